"""Workspaces of cuBLAS, made where they are wanted: for the threads of forward and backward, on the current stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from graphstep.engine.compiled_part import apply_of
from graphstep.engine.cuda_memory import stream_allocating_in

_NUM_STREAMS: Final = 32
"""As many as torch makes before it gives them out again."""
_FIRST_NAME: Final = 1 << 62
"""Far from the names that torch gives to pools: it counts them."""


def pool_of(stream: torch.cuda.Stream) -> tuple[int, int]:
    """The name of the pool for the workspaces of a stream: the same for all who have that stream, one after another."""
    return 0, _FIRST_NAME | stream.cuda_stream


def unused_stream(first: torch.cuda.Stream) -> torch.cuda.Stream:
    """A stream on which nobody else has memory; ``first`` if all that torch gives out are used. Slow.

    The workspaces of a stream belong to whoever was first to multiply on it. Graphs that write there would write into
    the memory of others once torch has freed them.
    """
    used = {
        int(segment["stream"])
        for segment in torch.cuda.memory_snapshot()
        if not any(segment["segment_pool_id"]) and any(block["state"] != "inactive" for block in segment["blocks"])
    }
    stream = first
    for _ in range(_NUM_STREAMS):
        if stream.cuda_stream not in used:
            return stream
        stream = torch.cuda.Stream(first.device)
    return first


def take(pool: Any, device: torch.device) -> None:
    """Have the libraries take the workspaces of the current stream from a pool, unless they have some.

    Nothing else comes to lie there. The pool stays in use for good.
    """
    factors = [_Factors.on(device, dtype) for dtype in (torch.float32, torch.bfloat16)]
    leaf = torch.zeros(1, device=device, requires_grad=True)
    ones = torch.ones_like(leaf)
    with torch.enable_grad(), stream_allocating_in(pool, device):
        torch.autograd.grad(_multiplied(leaf, factors), leaf, ones)


@dataclass(frozen=True, slots=True)
class _Factors:
    """Small matrices, and where their products go: to multiply them takes no memory but a workspace."""

    left: Tensor
    right: Tensor
    bias: Tensor
    result: Tensor

    @classmethod
    def on(cls, device: torch.device, dtype: torch.dtype) -> _Factors:
        left, right, result = torch.zeros(3, 16, 16, dtype=dtype, device=device)
        return cls(left, right, torch.zeros(16, dtype=dtype, device=device), result)

    def multiply(self) -> None:
        torch.mm(self.left, self.right, out=self.result)
        torch.addmm(self.bias, self.left, self.right, out=self.result)


class _Multiplied(torch.autograd.Function):
    """Multiplies in the thread of the caller, and in that of the backward pass, which has handles of its own."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, factors: Sequence[_Factors]) -> Tensor:
        ctx.factors = factors
        for each in factors:
            each.multiply()
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        for each in ctx.factors:
            each.result.zero_()  # A thread without a context gets one by a kernel; cuBLAS would warn.
            each.multiply()
        return gradients[0], None


_multiplied: Final = apply_of(_Multiplied)
