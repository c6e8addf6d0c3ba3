"""The arguments of ``make_graphed_callables``, checked and in one form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from graphstep.errors import ConfigError, Problem
from graphstep.strategies.local_forward import InstalledForward
from graphstep.strategies.order_steps import OrderStep, steps_of

Hooks = Mapping[str, Any]
_HOOK_KINDS: Final = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


@dataclass(slots=True)
class GraphedArguments:
    """What to capture: checked arguments."""

    callables: tuple[Callable[..., Any], ...]
    samples: list[tuple[tuple[Any, ...], dict[str, Any]]]
    layers_per_chunk: tuple[int, ...]
    num_microbatches: int
    order: tuple[OrderStep, ...]
    hooks: list[Hooks]
    is_single: bool
    is_ordered: bool

    @classmethod
    def read(
        cls,
        callables: Any,
        sample_args: Any,
        sample_kwargs: Any,
        num_warmup_iters: Any,
        order: Sequence[float] | None,
        layers_per_chunk: Sequence[int] | None,
        hooks: Sequence[Hooks | None] | None,
    ) -> GraphedArguments:
        """Bring the arguments into one form.

        Raises:
            ConfigError: all problems at once.
        """
        is_single = not isinstance(callables, (tuple, list))
        given = (callables,) if is_single else tuple(callables)
        if is_single and order is None:
            sample_args = (sample_args,)
        problems = [
            _problem(
                "callables",
                f"number {index + 1} is a {type(each).__name__} and cannot be called",
                "give modules or functions",
            )
            for index, each in enumerate(given)
            if not callable(each)
        ]
        if not torch.is_grad_enabled():
            what = "grad mode is off: there are no gradients to capture, and calls run eagerly in this mode"
            fix = "call it outside of no_grad() and inference_mode(), with samples and modules made outside as well"
            problems.append(Problem("graphed-callables-grad-mode", what, "make_graphed_callables", fix))
        problems += _repeated_modules(given, is_ordered=order is not None)
        if isinstance(num_warmup_iters, bool) or not isinstance(num_warmup_iters, int) or num_warmup_iters < 0:
            what = f"{num_warmup_iters!r} is no number of runs"
            problems.append(_problem("num_warmup_iters", what, "give 0 or more, such as 3"))
        if not given:
            problems.append(_problem("callables", "there are none", "give a module or a function"))
        chunks, num_microbatches, steps = _read_order(order, layers_per_chunk, len(given), problems)
        num_samples = num_microbatches * sum(chunks)
        samples = _read_samples(sample_args, sample_kwargs, num_samples, problems)
        if hooks is not None and len(hooks) != len(given):
            problems.append(
                _problem("capture_time_hooks", f"{len(hooks)} for {len(given)} callables", "give one or None for each")
            )
        found: list[Any] = list(hooks) if hooks is not None else [None] * len(given)
        for index, each in enumerate(found):
            if each is not None and not isinstance(each, Mapping):
                problems.append(
                    _problem("capture_time_hooks", f"number {index + 1} is no mapping", "give None or a dict")
                )
        known = [dict(each) if isinstance(each, Mapping) else {} for each in found]
        for index, each in enumerate(known):
            unknown = sorted(set(each) - set(_HOOK_KINDS))
            if unknown:
                what = f"{', '.join(map(repr, unknown))} of callable {index + 1} is no kind of hook"
                problems.append(_problem("capture_time_hooks", what, f"use {', '.join(_HOOK_KINDS)}"))
        if problems:
            raise ConfigError(problems)
        return cls(given, samples, chunks, num_microbatches, steps, list(known), is_single, order is not None)

    def index_of(self, chunk: int, microbatch: int, layer: int) -> int:
        """The place of a sample in the list of all."""
        return (
            self.num_microbatches * sum(self.layers_per_chunk[:chunk])
            + microbatch * self.layers_per_chunk[chunk]
            + layer
        )

    def callable_of(self, chunk: int, layer: int) -> int:
        """The place of a layer in the list of callables."""
        return sum(self.layers_per_chunk[:chunk]) + layer


def _read_order(
    order: Sequence[float] | None, layers_per_chunk: Sequence[int] | None, num_callables: int, problems: list[Problem]
) -> tuple[tuple[int, ...], int, tuple[OrderStep, ...]]:
    if order is None:
        if layers_per_chunk is not None:
            problems.append(_problem("_num_layers_per_chunk", "it was given without _order", "give both or neither"))
        return (num_callables,), 1, steps_of([1, -1], num_chunks=1)
    given: Any = order
    entries = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given]
    if not all(isinstance(entry, (int, float)) and math.isfinite(entry) for entry in entries):
        wrong = next(entry for entry in entries if not isinstance(entry, (int, float)) or not math.isfinite(entry))
        problems.append(_problem("_order", f"{wrong!r} is no chunk", "give a list of numbers, such as [1, -1]"))
        return (num_callables,), 0, ()
    order = entries
    num_chunks = int(max((abs(entry) for entry in order), default=0))
    num_layers, rest = divmod(num_callables, max(1, num_chunks))
    chunks = tuple(layers_per_chunk) if layers_per_chunk is not None else (num_layers,) * num_chunks
    if layers_per_chunk is None and rest:
        what = f"{num_callables} callables are not as many for each of {num_chunks} chunks"
        problems.append(_problem("callables", what, "give _num_layers_per_chunk"))
    elif len(chunks) != num_chunks or sum(chunks) != num_callables or min(chunks, default=1) < 1:
        what = f"{list(chunks)} does not divide {num_callables} callables among {num_chunks} chunks"
        problems.append(_problem("_num_layers_per_chunk", what, "name a number for each chunk that _order names"))
    try:
        steps = steps_of(order, num_chunks=max(1, num_chunks))
    except ConfigError as error:
        problems.extend(error.problems)
        return chunks, 0, ()
    return chunks, 1 + max(step.microbatch for step in steps), steps


def _repeated_modules(callables: Sequence[Any], *, is_ordered: bool) -> list[Problem]:
    problems = []
    for index, each in enumerate(callables):
        if not isinstance(each, nn.Module):
            continue
        if isinstance(each.__dict__.get("forward"), InstalledForward):
            what = f"number {index + 1} is captured already"
            problems.append(_problem("callables", what, "reset() those graphs, or close() what has captured it"))
        elif not is_ordered and any(each is other for other in callables[:index]):
            what = f"number {index + 1} was given before, and has one forward to replace"
            problems.append(_problem("callables", what, "give it once, or give lambdas that call it"))
    return problems


def _read_samples(
    sample_args: Any, sample_kwargs: Any, num_samples: int, problems: list[Problem]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    if not num_samples:
        return []
    arguments = list(sample_args) if isinstance(sample_args, (tuple, list)) else None
    if arguments is None or not all(isinstance(each, (tuple, list)) for each in arguments):
        what = "it has to be a tuple of arguments for one callable, and a tuple of such tuples for several"
        fix = "write (x,) for a single argument, and ((x,), (y,)) for two callables or microbatches"
        problems.append(_problem("sample_args", what, fix))
        return []
    if sample_kwargs is None or isinstance(sample_kwargs, Mapping):
        named = [dict(sample_kwargs or {}) for _ in range(num_samples)]
    else:
        if not isinstance(sample_kwargs, Iterable) or not all(isinstance(each, Mapping) for each in sample_kwargs):
            problems.append(_problem("sample_kwargs", "it has to be a dict, or one for each sample", "give dicts"))
            return []
        named = [dict(each) for each in sample_kwargs]
    for name, found in (("sample_args", len(arguments)), ("sample_kwargs", len(named))):
        if found != num_samples:
            what = f"expected {num_samples} entries (callables times microbatches), got {found}"
            problems.append(_problem(name, what, "give one for each chunk, microbatch and layer, in that order"))
    return [(tuple(args), kwargs) for args, kwargs in zip(arguments, named, strict=False)]


def _problem(where: str, what: str, fix: str) -> Problem:
    return Problem(f"graphed-callables-{where.strip('_').replace('_', '-')}", f"{where}: {what}", where, fix)
