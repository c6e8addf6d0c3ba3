"""What an order is: one entry for each forward, backward and weight gradient of a pipeline rank, as plain numbers.

An order is a list of entries: ``n`` is a forward of the n-th model chunk of the rank, ``-n`` its backward, and
``-n - 0.5`` its weight gradients where they are computed apart from those of the activations. Ids of chunks in an order
count from 1, so that the sign can tell forward from backward; everywhere else chunks and microbatches count from 0.

The notation is that of the argument ``_order`` of ``make_graphed_callables`` in Transformer Engine.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from graphstep.capture.plan import Phase
from graphstep.errors import Problem
from graphstep.strategies.order_problems import raise_if_any, size_problems


@dataclass(frozen=True, slots=True)
class OrderStep:
    """One entry of an order, in words: ``forward of chunk 1, microbatch 3``."""

    chunk: int
    """Model chunk of the rank, from 0; with one id for each layer (see `order_of_layers`), the layer."""
    microbatch: int
    """From 0, counted for each chunk and phase: the k-th backward of a chunk belongs to its k-th forward."""
    phase: Phase
    """What is done."""

    def __str__(self) -> str:
        return f"{self.phase.value} of chunk {self.chunk}, microbatch {self.microbatch}"


def steps_of(order: Sequence[float], *, num_chunks: int, names: str = "_order") -> tuple[OrderStep, ...]:
    """Read an order, and refuse one that cannot run.

    ``n`` is a forward of the n-th chunk, ``-n`` its backward, ``-n - 0.5`` its weight gradients, so that rounding up
    gives ``-n`` for both: ``[1, 2, -2, -2.5, -1, -1.5]`` is one microbatch through two chunks and back. Whole numbers
    may be floats. Weight gradients have entries either nowhere, and then belong to the backwards, or for each backward.

    Args:
        order: the entries.
        num_chunks: ids are 1 to this.
        names: how the caller calls the list, for the errors.

    Returns:
        A step for each entry, in the same order.

    Raises:
        ConfigError: with every problem. Codes: ``order-empty``, ``order-entry`` (no such number), ``order-zero``,
            ``order-unknown-chunk``; ``order-unbalanced`` (a chunk has as many backwards as forwards, and as many
            weight gradients if there are any), ``order-not-whole-microbatches`` (all chunks have as many forwards);
            ``order-backward-before-forward``, ``order-weight-gradient-early`` (before its backward).
    """
    raise_if_any(size_problems({"num_chunks": num_chunks}))
    steps, problems = read_order(order, num_chunks, names)
    raise_if_any(problems)
    return steps


def max_in_flight(steps: Sequence[OrderStep]) -> dict[int, int]:
    """The most microbatches of each chunk that are between their forward and their last gradients at the same time.

    So many sets of static tensors serve all microbatches. Once there are many, more of them need no more sets, but a
    shorter last group can need some. The last gradients are those of the backward, or those of the weights where they
    have steps of their own.

    Args:
        steps: of `steps_of`.
    """
    delayed = {step.chunk for step in steps if step.phase is Phase.WEIGHT_GRADIENT}
    num_now: dict[int, int] = {}
    num_most: dict[int, int] = {}
    for step in steps:
        last = Phase.WEIGHT_GRADIENT if step.chunk in delayed else Phase.BACKWARD
        if step.phase is Phase.FORWARD:
            num_now[step.chunk] = num_now.get(step.chunk, 0) + 1
            num_most[step.chunk] = max(num_most.get(step.chunk, 0), num_now[step.chunk])
        elif step.phase is last:
            num_now[step.chunk] -= 1
    return num_most


def read_order(order: Sequence[float], num_chunks: int, names: str) -> tuple[tuple[OrderStep, ...], list[Problem]]:
    """Like :func:`steps_of`, with what can be read and the problems of the rest."""
    problems: list[Problem] = []
    steps: list[OrderStep] = []
    places: dict[Phase, list[list[int]]] = {phase: [[] for _ in range(num_chunks)] for phase in Phase}
    for position, entry in enumerate(order):
        read = _read_entry(entry, num_chunks, f"{names}[{position}]")
        if isinstance(read, Problem):
            problems.append(read)
            continue
        chunk, phase = read
        steps.append(OrderStep(chunk, len(places[phase][chunk]), phase))
        places[phase][chunk].append(position)
    problems += _count_problems(places, names)
    problems += _sequence_problems(places, names)
    if not order:
        problems.append(
            Problem(
                code="order-empty",
                what="an order has at least a forward and a backward of each chunk, got no entry",
                where=names,
                fix="use pipeline_order, or list the entries as they run",
            )
        )
    return tuple(steps), problems


def _read_entry(entry: float, num_chunks: int, where: str) -> tuple[int, Phase] | Problem:
    """Chunk, from 0, and phase."""
    # A bool is an int for Python, and True would pass for the forward of the first chunk.
    is_number = isinstance(entry, int) or (isinstance(entry, float) and math.isfinite(entry))
    number = math.ceil(entry) if is_number and not isinstance(entry, bool) else None
    is_half = number is not None and entry < 0 and number - entry == 0.5
    if number is None or (number != entry and not is_half):
        return Problem(
            code="order-entry",
            what=f"entries are n, -n or -n - 0.5 for the chunks n = 1 to {num_chunks}, got {entry!r}",
            where=where,
            fix="write a forward as n, its backward as -n, its weight gradients as -n - 0.5",
        )
    if number == 0:
        return Problem(
            code="order-zero",
            what=f"ids of chunks count from 1 to {num_chunks}, and the sign tells forward from backward, got {entry!r}",
            where=where,
            fix="add 1 to the ids of chunks that count from 0",
        )
    if abs(number) > num_chunks:
        return Problem(
            code="order-unknown-chunk",
            what=f"ids of chunks count from 1 to {num_chunks}, got {abs(number)} in entry {entry!r}",
            where=where,
            fix=f"use 1 to {num_chunks}, or give all chunks",
        )
    if is_half:
        return -number - 1, Phase.WEIGHT_GRADIENT
    return abs(number) - 1, Phase.FORWARD if number > 0 else Phase.BACKWARD


def _count_problems(places: Mapping[Phase, Sequence[Sequence[int]]], names: str) -> Iterator[Problem]:
    # Either all backwards leave the weight gradients to entries of their own, or none does.
    phases = [phase for phase in Phase if phase is not Phase.WEIGHT_GRADIENT or any(places[phase])]
    for chunk, lists in enumerate(zip(*(places[phase] for phase in phases), strict=True)):
        if len(set(map(len, lists))) > 1:
            found = ", ".join(f"{phase.value}: {len(each)}" for phase, each in zip(phases, lists, strict=True))
            yield Problem(
                code="order-unbalanced",
                what=f"a chunk has as many entries of each kind as microbatches, got for chunk {chunk} {found}",
                where=names,
                fix="list every microbatch once in each",
            )
    nums = [len(each) for each in places[Phase.FORWARD]]
    if len(set(nums)) > 1:
        found = ", ".join(f"chunk {chunk}: {num}" for chunk, num in enumerate(nums))
        yield Problem(
            code="order-not-whole-microbatches",
            what=f"every microbatch goes through all chunks, got numbers of forwards {found}",
            where=names,
            fix="list as many forwards of each chunk as there are microbatches",
        )


def _sequence_problems(places: Mapping[Phase, Sequence[Sequence[int]]], names: str) -> Iterator[Problem]:
    pairs = (
        (Phase.FORWARD, Phase.BACKWARD, "order-backward-before-forward"),
        (Phase.BACKWARD, Phase.WEIGHT_GRADIENT, "order-weight-gradient-early"),
    )
    for before, after, code in pairs:
        for chunk, (firsts, seconds) in enumerate(zip(places[before], places[after], strict=True)):
            # What has no counterpart at all is a matter of counts.
            for microbatch, (first, second) in enumerate(zip(firsts, seconds, strict=False)):
                if second < first:
                    yield Problem(
                        code=code,
                        what=f"{OrderStep(chunk, microbatch, after)} comes after its {before.value} "
                        f"at position {first}, got it at position {second}",
                        where=f"{names}[{second}]",
                        fix=f"move the {before.value} ahead, or the {after.value} back",
                    )
