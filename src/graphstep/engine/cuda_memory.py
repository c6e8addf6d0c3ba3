"""What torch's allocator holds on a GPU, by pool and by stream (slow: it lists all of it), and eager work on a pool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def pool_segments(pools: Sequence[Any]) -> list[int]:
    """Bytes reserved from the driver for each of some private pools."""
    sizes: dict[tuple[int, ...], int] = {}
    for segment in torch.cuda.memory_snapshot():
        name = tuple(segment["segment_pool_id"])
        sizes[name] = sizes.get(name, 0) + int(segment["total_size"])
    return [sizes.get(tuple(pool), 0) for pool in pools]


def blocks_in_use(pool: Any) -> frozenset[int]:
    """Addresses of the memory in a pool that somebody holds, or that another stream may still use."""
    found = set()
    for segment in torch.cuda.memory_snapshot():
        if tuple(segment["segment_pool_id"]) != tuple(pool):
            continue
        address = int(segment["address"])
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                found.add(address)
            address += int(block["size"])
    return frozenset(found)


def can_allocate_in() -> bool:
    """Whether torch knows how to let a thread allocate in a pool."""
    return all(hasattr(torch._C, name) for name in _NEEDED)


@contextmanager
def allocating_in(pool: Any, device: torch.device) -> Iterator[None]:
    """Let this thread allocate in a pool while the body runs. Other threads, that of a backward too, do not."""
    begin, end, release = (getattr(torch._C, name) for name in _NEEDED)
    begin(device.index, pool)
    try:
        yield
    finally:
        end(device.index, pool)
        release(device.index, pool)


@contextmanager
def stream_allocating_in(pool: Any, device: torch.device) -> Iterator[None]:
    """Let the current stream allocate in a pool while the body runs, from all threads; where torch cannot, as before.

    The pool stays in use for good: what is freed in it is given to nobody else.
    """
    begin = getattr(torch._C, "_cuda_beginAllocateCurrentStreamToPool", None)
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    if begin is None or end is None:
        yield
        return
    begin(device.index, pool)
    try:
        yield
    finally:
        end(device.index, pool)


_NEEDED = ("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool", "_cuda_releasePool")
