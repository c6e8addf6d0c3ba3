"""Finds out which samples are results of other callables: those are read where they are, without a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from graphstep.capture.session import GraphSession
from graphstep.capture.tree import flatten

Sample = tuple[tuple[Any, ...], dict[str, Any]]


def results_among(
    function: Callable[..., Any], sample: Sample, following: Sequence[Tensor], session: GraphSession
) -> Mapping[int, Tensor]:
    """Which of the following callable's samples are results of a call of ``function`` with its own sample.

    A tensor is taken for one if autograd has recorded for it what it records for the result of such a call: the same
    operations, on the same leaves. Dropout may have drawn other numbers. The function runs once for it, and that is
    undone.

    Returns:
        By number of the result, the tensor among ``following``.
    """
    wanted = [tensor for tensor in following if tensor.grad_fn is not None]
    if not wanted:
        return {}
    found: dict[int, Tensor] = {}

    def run() -> None:
        found.clear()
        arguments, named = sample
        with torch.enable_grad():
            outputs, _ = flatten(function(*arguments, **named))
        for tensor in wanted:
            for number, output in enumerate(outputs):
                if number not in found and _is_alike(output, tensor):
                    found[number] = tensor
                    break

    session.observe(run)
    return found


def _is_alike(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    if one.output_nr != other.output_nr or one.stride() != other.stride():
        return False
    seen: set[tuple[Any, Any]] = set()
    waiting: list[tuple[Any, Any]] = [(one.grad_fn, other.grad_fn)]
    while waiting:
        pair = waiting.pop()
        first, second = pair
        if first is second or pair in seen:
            continue
        seen.add(pair)
        if first is None or second is None or first.name() != second.name():
            return False
        if getattr(first, "variable", None) is not getattr(second, "variable", None):
            return False
        edges = first.next_functions, second.next_functions
        if [number for _, number in edges[0]] != [number for _, number in edges[1]]:
            return False
        waiting.extend((a, b) for (a, _), (b, _) in zip(*edges, strict=True))
    return True
