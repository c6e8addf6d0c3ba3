"""Calls of fused optimizers, cut into parts that run side by side."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from graphstep.capture.memory_extents import extent_of
from graphstep.engine import torch_private

_NAMES: Final = ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
_MOST_TENSORS: Final = 36
_MOST_CHUNKS: Final = 320
_CHUNK: Final = 65536
"""torch launches a kernel for so many tensors at most, and so many chunks of so many elements."""


def parts_of(func: Any, args: Sequence[Any], most: int) -> list[tuple[Any, ...]]:
    """Arguments of several calls that together do what one does; of that one alone if there is nothing to gain.

    torch cuts the tensors of such a call into several launches, one after another, each of which is short and leaves
    most of the GPU idle at its end. What is done to a tensor does not depend on the others.

    Args:
        func: an operation.
        args: positional ones: lists of equally many tensors, or empty ones, the parameters first.
        most: parts.
    """
    if not is_fused_step(func) or not args or not all(isinstance(each, (list, tuple)) for each in args):
        return [tuple(args)]
    parameters = args[0]
    number = len(parameters)
    are_lists = all(len(each) in (0, number) and all(isinstance(t, Tensor) for t in each) for each in args)
    if not are_lists or not number or _overlap([tensor for each in args for tensor in each if tensor.numel() > 1]):
        return [tuple(args)]
    chunks = [-(-parameter.numel() // _CHUNK) for parameter in parameters]
    num_launches = max(-(-number // _MOST_TENSORS), -(-sum(chunks) // _MOST_CHUNKS))
    groups: list[list[int]] = [[] for _ in range(min(num_launches, most, number))]
    loads, room = [0] * len(groups), max(-(-number // len(groups)), _MOST_TENSORS)
    for index in sorted(range(number), key=lambda i: -chunks[i]):
        has_room = (g for g, group in enumerate(groups) if len(group) < room)
        lightest = min(has_room, key=lambda g: (loads[g], len(groups[g])))
        groups[lightest].append(index)
        loads[lightest] += chunks[index]
    return [tuple([each[i] for i in group] if each else [] for each in args) for group in groups]


def _overlap(tensors: Sequence[Tensor]) -> bool:
    """Whether any two of these have memory in common."""
    if not all(map(torch_private.has_plain_memory, tensors)):
        return True
    extents = sorted(map(extent_of, tensors))
    return any(last > first for (_, last), (first, _) in itertools.pairwise(extents))


def is_fused_step(func: Any) -> bool:
    """Is this the step of a fused optimizer?"""
    return any(func.overloadpacket is getattr(torch.ops.aten, name, None) for name in _NAMES)
