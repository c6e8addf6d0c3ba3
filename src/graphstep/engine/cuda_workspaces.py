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
_SIZE_OF_MARK: Final = 512
"""The least that torch allocates. Workspaces are larger."""
_FIRST_NAME: Final = 1 << 62
"""Far from the names that torch gives to pools: it counts them."""


def pool_of(stream: torch.cuda.Stream) -> tuple[int, int]:
    """The name of the pool for the workspaces of a stream: the same for all who have that stream, one after another."""
    return 0, _FIRST_NAME | stream.cuda_stream


def stream_for_captures(first: torch.cuda.Stream) -> torch.cuda.Stream:
    """A stream whose workspaces an engine that is gone has left in their pool, or one on which nobody has memory.

    The workspaces of a stream belong to whoever was first to multiply on it. Graphs that write there would write into
    the memory of others once torch has freed them. Slow.

    Returns:
        ``first`` if all streams that torch gives out are used otherwise.
    """
    used, left, marked = set[int](), set[int](), set[int]()
    for segment in torch.cuda.memory_snapshot():
        if int(segment["device"]) != first.device_index:
            continue
        sizes = {int(block["size"]) for block in segment["blocks"] if block["state"] != "inactive"}
        _, name = segment["segment_pool_id"]
        if name >= _FIRST_NAME:
            left.add(name ^ _FIRST_NAME)
            marked |= {name ^ _FIRST_NAME} if _SIZE_OF_MARK in sizes else set()
        elif sizes and not any(segment["segment_pool_id"]):
            used.add(int(segment["stream"]))
    used |= marked
    streams = [first, *(torch.cuda.Stream(first.device) for _ in range(_NUM_STREAMS))]
    free = [stream for stream in streams if stream.cuda_stream not in used]
    return next((stream for stream in free if stream.cuda_stream in left), next(iter(free), first))


def take(pool: Any, device: torch.device, *, only_backward: bool = False) -> Tensor:
    """Have the libraries take the workspaces of the current stream from a pool, unless they have some.

    Nothing else comes to lie there but a mark. The pool stays in use for good.

    Args:
        pool: its name.
        device: of the stream.
        only_backward: only those of the thread that backward passes run in; where that is not the caller's.

    Returns:
        The mark: as long as it lives, the pool belongs to its owner.
    """
    factors = [_Factors.on(device, dtype) for dtype in (torch.float32, torch.bfloat16)]
    leaf = torch.zeros(1, device=device, requires_grad=True)
    ones = torch.ones_like(leaf)
    with torch.enable_grad(), stream_allocating_in(pool, device):
        torch.autograd.grad(_multiplied(leaf, factors, only_backward), leaf, ones)
        return torch.empty(1, device=device)


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
    def forward(ctx: Any, leaf: Tensor, factors: Sequence[_Factors], only_backward: bool) -> Tensor:
        ctx.factors = factors
        if not only_backward:
            for each in factors:
                each.multiply()
        return leaf.view_as(leaf)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        for each in ctx.factors:
            each.result.zero_()  # A thread without a context gets one by a kernel; cuBLAS would warn.
            each.multiply()
        return gradients[0], None, None


_multiplied: Final = apply_of(_Multiplied)
