"""What torch's allocator holds on a GPU: by private pool, and by stream. Slow, as it lists all of its memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def pool_segments(pools: Sequence[Any]) -> list[int]:
    """Bytes reserved from the driver for each of some private pools."""
    sizes: dict[tuple[int, ...], int] = {}
    for segment in torch.cuda.memory_snapshot():
        name = tuple(segment["segment_pool_id"])
        sizes[name] = sizes.get(name, 0) + int(segment["total_size"])
    return [sizes.get(tuple(pool), 0) for pool in pools]


def held_on_stream(stream: torch.cuda.Stream) -> int:
    """Bytes in use on a stream outside of private pools."""
    return sum(
        int(block["size"])
        for segment in torch.cuda.memory_snapshot()
        if segment["stream"] == stream.cuda_stream and not any(segment["segment_pool_id"])
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )
