"""Calls of fused optimizers are cut where torch would launch several kernels, into parts of about equal size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphstep.capture.optimizer_parts import is_fused_step, parts_of

ADAMW = torch.ops.aten._fused_adamw_.default


def arguments(sizes: list[int]) -> list[list[Tensor]]:
    """Parameters, gradients, two moments, no largest second moments, and steps."""
    lists = [[torch.empty(size) for size in sizes] for _ in range(4)]
    return [*lists, [], [torch.zeros(()) for _ in sizes]]


@pytest.mark.parametrize(
    ("sizes", "number"),
    [([10] * 36, 1), ([10] * 37, 2), ([10] * 76, 3), ([10] * 1000, 4), ([65536 * 320], 1), ([65536 * 160] * 5, 3)],
)
def test_number_of_parts(sizes: list[int], number: int) -> None:
    args = arguments(sizes)
    parts = parts_of(ADAMW, args, 4)
    assert len(parts) == number
    for position, given in enumerate(args):
        found = [tensor for part in parts for tensor in part[position]]
        assert sorted(map(id, found)) == sorted(map(id, given)), "each of them once"
    for part in parts:
        places = [_place(args[0], parameter) for parameter in part[0]]
        for position in (1, 2, 3, 5):
            assert [_place(args[position], tensor) for tensor in part[position]] == places, "together with its own"


def _place(tensors: list[Tensor], wanted: Tensor) -> int:
    return next(i for i, tensor in enumerate(tensors) if tensor is wanted)


def test_parts_are_about_equal() -> None:
    sizes = [65536 * 128, *[65536 * 2] * 60, *[100] * 15]
    parts = parts_of(ADAMW, arguments(sizes), 4)
    loads = [sum(t.numel() for t in part[0]) for part in parts]
    assert max(loads) < 65536 * 129
    assert min(loads) > 65536 * 50


def test_what_is_left_whole() -> None:
    twice = arguments([10] * 40)
    twice[0][3] = twice[0][0]
    assert len(parts_of(ADAMW, twice, 4)) == 1, "a parameter that is there twice"
    shared = arguments([10] * 40)
    shared[2][3] = shared[2][7][2:8]
    assert len(parts_of(ADAMW, shared, 4)) == 1, "moments in memory of others"
    assert len(parts_of(ADAMW, [[], [], []], 4)) == 1
    uneven = arguments([10] * 40)
    uneven[1].pop()
    assert len(parts_of(ADAMW, uneven, 4)) == 1
    assert len(parts_of(torch.ops.aten._foreach_add_.List, arguments([10] * 40)[:2], 4)) == 1
    assert len(parts_of(ADAMW, arguments([10] * 40), 1)) == 1
    assert is_fused_step(torch.ops.aten._fused_sgd_.default)
    assert not is_fused_step(torch.ops.aten.mm.default)
