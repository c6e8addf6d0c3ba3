"""In which order the forwards and backwards of one pipeline rank run, as plain numbers.

An order is a list of entries: ``n`` is a forward of the n-th model chunk of the rank, ``-n`` its backward, and
``-n - 0.5`` its weight gradients where they are computed apart from those of the activations. Ids of chunks in an order
count from 1, so that the sign can tell forward from backward; everywhere else chunks and microbatches count from 0.

Sources: one forward, one backward in turn (1F1B), Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training"
(arXiv 2006.09503), section 3.2; the interleaved schedule, Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters" (arXiv 2104.04473), section 2.2; the notation is that of the argument ``_order`` of
``make_graphed_callables`` in Transformer Engine.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest

from graphstep.errors import ConfigError, Problem


class Phase(enum.Enum):
    """What an entry of an order does with its microbatch."""

    FORWARD = "forward"
    """Computes the outputs, and keeps what the backward needs."""
    BACKWARD = "backward"
    """Computes the gradients of the inputs, and those of the weights unless they have entries of their own."""
    WEIGHT_GRADIENT = "weight gradients"
    """Computes the gradients of the weights, some time after the backward."""


@dataclass(frozen=True, slots=True)
class OrderStep:
    """One entry of an order, in words: ``forward of chunk 1, microbatch 3``."""

    chunk: int
    """Model chunk of the rank, from 0; with one id for each layer (see `expanded`), the layer."""
    microbatch: int
    """From 0, counted for each chunk and phase: the k-th backward of a chunk belongs to its k-th forward."""
    phase: Phase
    """What is done."""

    def __str__(self) -> str:
        return f"{self.phase.value} of chunk {self.chunk}, microbatch {self.microbatch}"


def schedule_table(
    num_microbatches: int, num_model_chunks: int, microbatch_group_size: int
) -> tuple[tuple[int, int], ...]:
    """(microbatch, chunk) of each forward of an interleaved schedule, both from 0, in the order in which they run.

    A group of microbatches goes through chunk after chunk before the next group begins. The last group may be shorter.

    Raises:
        ConfigError: a size is not a whole number of at least 1.
    """
    sizes = {
        "num_microbatches": num_microbatches,
        "num_model_chunks": num_model_chunks,
        "microbatch_group_size": microbatch_group_size,
    }
    _raise_if_any(_size_problems(sizes))
    return tuple(
        (microbatch, chunk)
        for first in range(0, num_microbatches, microbatch_group_size)
        for chunk in range(num_model_chunks)
        for microbatch in range(first, min(first + microbatch_group_size, num_microbatches))
    )


def num_warmup_forwards(
    pipeline_size: int,
    pipeline_rank: int,
    num_microbatches: int,
    num_model_chunks: int = 1,
    microbatch_group_size: int | None = None,
) -> int:
    """How many forwards a rank runs before forward and backward begin to take turns, forward first.

    With one chunk (1F1B), as many as there are stages after this one: 0 for one stage. With more (interleaved), twice
    as many and a group for each chunk but the last, also for one stage: the first backward is one of the last chunk,
    whose forward comes only then. Never more than there are forwards.

    Args:
        pipeline_size: stages of the pipeline.
        pipeline_rank: this stage, from 0.
        num_microbatches: of a step.
        num_model_chunks: of each stage.
        microbatch_group_size: microbatches that go through a chunk before the next chunk's turn; the pipeline size
            if None. Nothing depends on it with one chunk.

    Raises:
        ConfigError: what `pipeline_order` refuses.

    Source: arXiv 2104.04473, section 2.2, and its implementation in Megatron-LM. The first microbatch reaches the last
    chunk of the rank after the groups of the other chunks, and is back from the last stage after going through the
    later stages twice; forwards fill that time. 1F1B waits instead, and keeps fewer microbatches in flight.
    """
    _raise_if_any(
        _schedule_problems(pipeline_size, pipeline_rank, num_microbatches, num_model_chunks, microbatch_group_size)
    )
    num_later_stages = pipeline_size - pipeline_rank - 1
    num_warmup = num_later_stages
    if num_model_chunks > 1:
        num_warmup += num_later_stages + (num_model_chunks - 1) * (microbatch_group_size or pipeline_size)
    return min(num_warmup, num_microbatches * num_model_chunks)


def order_of(table: Sequence[tuple[int, int]], num_warmup: int, num_model_chunks: int) -> tuple[int, ...]:
    """The order that follows from a table of forwards: warmup forwards, forward and backward in turn, what is left.

    The backwards follow the same table with the chunks mirrored, the last one first.

    Args:
        table: (microbatch, chunk) of each forward, as `schedule_table` has it.
        num_warmup: forwards before the alternation, 0 to the length of the table.
        num_model_chunks: chunks of the rank.

    Raises:
        ConfigError: a chunk or ``num_warmup`` is out of range, or the order is not one that can run (see `steps_of`):
            too few warmup forwards, or chunks with different numbers of microbatches.
    """
    problems = _size_problems({"num_model_chunks": num_model_chunks})
    if not _is_whole(num_warmup) or not 0 <= num_warmup <= len(table):
        problems.append(
            Problem(
                code="pipeline-warmup",
                what=f"num_warmup is between 0 and the {len(table)} forwards of the table, got {num_warmup!r}",
                where="argument num_warmup",
                fix="use num_warmup_forwards",
            )
        )
    problems += [
        Problem(
            code="pipeline-table",
            what=f"chunks of the table are from 0 and below num_model_chunks={num_model_chunks}, got {chunk!r}",
            where=f"table[{position}]",
            fix="use schedule_table with the same number of chunks",
        )
        for position, (_, chunk) in enumerate(table)
        if not _is_whole(chunk) or chunk < 0 or (_is_size(num_model_chunks) and chunk >= num_model_chunks)
    ]
    _raise_if_any(problems)

    forwards = [chunk + 1 for _, chunk in table]
    backwards = [chunk - num_model_chunks for _, chunk in table]
    num_pairs = len(table) - num_warmup
    order = forwards[:num_warmup]
    for pair in zip(forwards[num_warmup:], backwards[:num_pairs], strict=True):
        order += pair
    order += backwards[num_pairs:]
    steps_of(order, num_chunks=num_model_chunks, names=f"order_of(num_warmup={num_warmup})")
    return tuple(order)


def pipeline_order(
    num_microbatches: int,
    *,
    pipeline_size: int = 1,
    pipeline_rank: int = 0,
    num_model_chunks: int = 1,
    microbatch_group_size: int | None = None,
) -> tuple[int, ...]:
    """The order of one rank: ``1 -1 1 -1 ...`` without a pipeline, 1F1B, or interleaved with several chunks.

    Args:
        num_microbatches: of a step.
        pipeline_size: stages of the pipeline.
        pipeline_rank: this stage, from 0.
        num_model_chunks: of each stage; more than 1: the interleaved schedule.
        microbatch_group_size: see `num_warmup_forwards`.

    Raises:
        ConfigError: a size is below 1 or the rank outside the pipeline; or, with several chunks, a group is smaller
            than the pipeline, or the last of several groups is. Such ranks can wait for each other forever: a stage
            goes on to the next chunk before its first microbatch has come round the pipeline.
    """
    num_warmup = num_warmup_forwards(
        pipeline_size, pipeline_rank, num_microbatches, num_model_chunks, microbatch_group_size
    )
    table = schedule_table(num_microbatches, num_model_chunks, microbatch_group_size or pipeline_size)
    return order_of(table, num_warmup, num_model_chunks)


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
    _raise_if_any(_size_problems({"num_chunks": num_chunks}))
    steps, problems = _read_order(order, num_chunks, names)
    _raise_if_any(problems)
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


def expanded(
    order: Sequence[float], layers_per_chunk: Sequence[int], *, delays_weight_gradients: bool = False
) -> tuple[float, ...]:
    """The order of layers when a backward overlaps the next forward, to hide the exchange of tokens between experts.

    Every layer gets an id of its own: the layers of the first chunk, then those of the second, from 1. Read the result
    with ``steps_of(result, num_chunks=sum(layers_per_chunk))``.

    - A backward that is directly followed by a forward runs together with it: the first layer of the forward, the last
      layer of the backward, the second of the forward, and so on; what one has more of follows. Each forward after the
      warmup forwards is such a one, except the first. The first layers of a chunk may have one more microbatch in
      flight for it.
    - Any other forward runs its layers in turn, any other backward in reverse.
    - With ``delays_weight_gradients``, those of a layer come behind the backward of the next layer of the pair, which
      other ranks may wait for, and those of the last one at the end of the pair. Of a backward that runs alone, each
      layer's come directly after it: nothing can hide them any more.

    Args:
        order: of whole chunks, without entries for weight gradients, as `pipeline_order` makes it. What are warmup
            forwards follows from it.
        layers_per_chunk: may be 0 for a chunk with nothing to capture, but not for all.
        delays_weight_gradients: weight gradients have entries of their own.

    Raises:
        ConfigError: as `steps_of`, or no layers, or the order has weight gradients already.
    """
    sizes = {f"layers_per_chunk[{chunk}]": num for chunk, num in enumerate(layers_per_chunk)}
    problems = _size_problems(sizes, at_least=0)
    if not any(layers_per_chunk):
        problems.append(
            Problem(
                code="order-no-layers",
                what=f"at least one chunk has layers, got layers_per_chunk={list(layers_per_chunk)}",
                where="argument layers_per_chunk",
                fix="capture nothing on a rank that has nothing to capture",
            )
        )
    steps: tuple[OrderStep, ...] = ()
    if layers_per_chunk:
        steps, order_problems = _read_order(order, len(layers_per_chunk), "order")
        problems += order_problems
    if any(step.phase is Phase.WEIGHT_GRADIENT for step in steps):
        problems.append(
            Problem(
                code="order-weight-gradients-twice",
                what="the order of whole chunks has no entries for weight gradients, got some",
                where="order",
                fix="leave such entries out, and say delays_weight_gradients=True",
            )
        )
    _raise_if_any(problems)

    ends = accumulate(layers_per_chunk)
    ids = [range(end - num + 1, end + 1) for end, num in zip(ends, layers_per_chunk, strict=True)]
    return tuple(_entries_of_layers(steps, ids, delays_weight_gradients))


def _entries_of_layers(
    steps: Sequence[OrderStep], ids: Sequence[range], delays_weight_gradients: bool
) -> Iterator[float]:
    overlapped: OrderStep | None = None
    for step, following in zip_longest(steps, steps[1:]):
        if step.phase is Phase.FORWARD:
            backward = ids[overlapped.chunk][::-1] if overlapped else range(0)
            yield from _side_by_side(ids[step.chunk], backward, delays_weight_gradients)
            overlapped = None
        elif following is not None and following.phase is Phase.FORWARD:
            overlapped = step
        else:
            for layer in reversed(ids[step.chunk]):
                yield -layer
                if delays_weight_gradients:
                    yield -layer - 0.5


def _side_by_side(forward: range, backward: range, delays_weight_gradients: bool) -> Iterator[float]:
    waiting: int | None = None
    for forward_layer, backward_layer in zip_longest(forward, backward):
        if forward_layer is not None:
            yield forward_layer
        if backward_layer is not None:
            yield -backward_layer
            if delays_weight_gradients:
                if waiting is not None:
                    yield -waiting - 0.5
                waiting = backward_layer
    if waiting is not None:
        yield -waiting - 0.5


def _read_order(order: Sequence[float], num_chunks: int, names: str) -> tuple[tuple[OrderStep, ...], list[Problem]]:
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


def _schedule_problems(
    pipeline_size: int, pipeline_rank: int, num_microbatches: int, num_model_chunks: int, group_size: int | None
) -> list[Problem]:
    sizes = {
        "pipeline_size": pipeline_size,
        "num_microbatches": num_microbatches,
        "num_model_chunks": num_model_chunks,
    }
    if group_size is None:
        group_size = pipeline_size
    else:
        sizes["microbatch_group_size"] = group_size
    problems = _size_problems(sizes)
    num_ranks = pipeline_size if _is_size(pipeline_size) else math.inf
    if not _is_whole(pipeline_rank) or not 0 <= pipeline_rank < num_ranks:
        problems.append(
            Problem(
                code="pipeline-rank",
                what=f"a rank is from 0 and below pipeline_size={pipeline_size!r}, got {pipeline_rank!r}",
                where="argument pipeline_rank",
                fix="give the rank in the group of the pipeline, not that of the process",
            )
        )
    if not all(map(_is_size, sizes.values())) or num_model_chunks == 1:
        return problems
    num_left = num_microbatches % group_size
    if group_size < pipeline_size:
        problems.append(
            Problem(
                code="pipeline-group-size",
                what=f"a group has at least one microbatch for each of {pipeline_size} stages, got {group_size}",
                where="argument microbatch_group_size",
                fix=f"use {pipeline_size} or more",
            )
        )
    elif num_microbatches > group_size and 0 < num_left < pipeline_size:
        problems.append(
            Problem(
                code="pipeline-microbatches",
                what=f"what groups of {group_size} leave of the microbatches is none, or at least one for each of "
                f"{pipeline_size} stages, got {num_left} of {num_microbatches}",
                where="argument num_microbatches",
                fix=f"use {num_microbatches - num_left} or {num_microbatches - num_left + pipeline_size} microbatches",
            )
        )
    return problems


def _size_problems(sizes: Mapping[str, int], at_least: int = 1) -> list[Problem]:
    return [
        Problem(
            code="pipeline-size",
            what=f"{name} is a whole number of at least {at_least}, got {size!r}",
            where=f"argument {name}",
            fix=f"use {at_least} or more",
        )
        for name, size in sizes.items()
        if not _is_whole(size) or size < at_least
    ]


def _is_whole(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool)


def _is_size(size: int) -> bool:
    return _is_whole(size) and size >= 1


def _raise_if_any(problems: Sequence[Problem]) -> None:
    if problems:
        raise ConfigError(problems)
