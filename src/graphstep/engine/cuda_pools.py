"""Private memory pools of the CUDA allocator: what they hold, and eager work on their memory.

Private interfaces of torch; where one is missing, nothing is lent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def pool_segments(pools: Sequence[Any]) -> int:
    """Bytes reserved from the driver for some pools."""
    names = {tuple(pool) for pool in pools}
    snapshot = torch.cuda.memory_snapshot()
    return sum(int(segment["total_size"]) for segment in snapshot if tuple(segment["segment_pool_id"]) in names)


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


_NEEDED = ("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool", "_cuda_releasePool")
