"""Which stream captures run on, told from what torch's allocator holds: on any machine, with stand-ins for both."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from graphstep.engine import cuda_workspaces

NUM_STREAMS = 32
WORKSPACE, MARK = 32 * 2**20, 512
GENERAL = (0, 0)
DEVICE = torch.device("cuda", 0)


@dataclass(frozen=True)
class Stream:
    """As much of a stream as is asked for."""

    cuda_stream: int
    device: torch.device = DEVICE
    device_index: int = 0


def segment(stream: int, pool: tuple[int, int], *sizes: int, is_free: bool = False, device: int = 0) -> dict[str, Any]:
    """What the allocator tells of some memory."""
    state = "inactive" if is_free else "active_allocated"
    blocks = [{"size": size, "state": state} for size in sizes]
    return {"stream": stream, "segment_pool_id": pool, "device": device, "blocks": blocks}


def own(stream: int) -> tuple[int, int]:
    """The pool of the workspaces of a stream."""
    return cuda_workspaces.pool_of(Stream(stream))  # type: ignore[arg-type]


def chosen(monkeypatch: pytest.MonkeyPatch, *segments: dict[str, Any]) -> int:
    """The stream for captures, where torch gives out 1 to 32 in turns, and 1 was given out just before."""
    numbers = itertools.cycle([*range(2, NUM_STREAMS + 1), 1])
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: list(segments))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _device: Stream(next(numbers)))
    return cuda_workspaces.stream_for_captures(Stream(1)).cuda_stream  # type: ignore[arg-type]


def test_nobody_has_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch) == 1


def test_others_have_multiplied_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, segment(1, GENERAL, WORKSPACE), segment(2, GENERAL, 1024)) == 3


def test_memory_that_is_free_or_elsewhere_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    free = segment(1, GENERAL, WORKSPACE, is_free=True)
    assert chosen(monkeypatch, free, segment(1, GENERAL, WORKSPACE, device=1), segment(1, (0, 5), 4096)) == 1


def test_an_engine_that_is_gone_leaves_its_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, segment(7, own(7), WORKSPACE, WORKSPACE)) == 7
    assert chosen(monkeypatch, segment(7, own(7), WORKSPACE, is_free=True)) == 7


def test_an_engine_that_lives_keeps_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = (segment(1, own(1), WORKSPACE), segment(1, own(1), MARK))
    assert chosen(monkeypatch, *alive) == 2
    assert chosen(monkeypatch, *alive, segment(9, own(9), WORKSPACE)) == 9


def test_workspaces_that_lie_elsewhere_since_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has freed those in the pool, and somebody has multiplied on the stream since."""
    left = segment(7, own(7), WORKSPACE, is_free=True)
    assert chosen(monkeypatch, left, segment(7, GENERAL, WORKSPACE)) == 1


def test_all_streams_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, *(segment(number, GENERAL, 1024) for number in range(1, NUM_STREAMS + 1))) == 1
