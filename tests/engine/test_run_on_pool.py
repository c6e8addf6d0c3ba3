"""Eager work on the memory that graphs use between their replays."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphstep.capture.static_inputs import copies_of
from graphstep.engine import CudaEngine, Engine

NUM = 2**20


def squares(source: Tensor) -> Tensor:
    """Needs eight megabytes beside its result."""
    return (source.repeat(NUM) * 2).view(NUM, -1).square().sum(0)


def test_result_is_a_copy_and_graphs_replay_as_before(engine: Engine) -> None:
    source = torch.tensor([1.0, 2.0], device=engine.device)
    recording = engine.capture(lambda: squares(source), lane="steps")
    recording.replay()
    first = recording.result.clone()
    kept = [
        engine.run_on_pool(lambda number=number: {"sum": squares(source + number)}, lane="steps", copied=copies_of)
        for number in range(3)
    ]
    recording.replay()
    assert torch.equal(recording.result, first)
    assert not recording.is_closed
    for number, each in enumerate(kept):
        assert torch.equal(each["sum"], squares(source + number))


def test_a_lane_without_memory_is_none_to_lend(engine: Engine) -> None:
    source = torch.tensor([1.0, 2.0], device=engine.device)
    found = engine.run_on_pool(lambda: squares(source), lane="unknown", copied=copies_of)
    assert torch.equal(found, squares(source))


def test_errors_pass_through(engine: Engine) -> None:
    source = torch.tensor([1.0, 2.0], device=engine.device)
    engine.capture(lambda: squares(source), lane="steps")

    def fails() -> Tensor:
        squares(source)
        raise KeyError("of the function")

    with pytest.raises(KeyError, match="of the function"):
        engine.run_on_pool(fails, lane="steps", copied=copies_of)


@pytest.mark.gpu
def test_memory_does_not_grow() -> None:
    engine = CudaEngine()
    source = torch.tensor([1.0, 2.0], device=engine.device)
    recording = engine.capture(lambda: squares(source), lane="steps")
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    engine.run_on_pool(lambda: squares(source), lane="steps", copied=copies_of)
    assert torch.cuda.memory_reserved() - reserved <= 2 * 2**20, "the copy of the result"
    recording.replay()
    engine.close()
    assert engine.pool_bytes == 0


@pytest.mark.gpu
def test_what_is_left_in_the_pool_is_not_overwritten() -> None:
    engine = CudaEngine()
    source = torch.tensor([1.0, 2.0], device=engine.device)
    first, other = (engine.capture(lambda: squares(source), lane=lane) for lane in ("steps", "other"))
    cache: list[Tensor] = []

    def fills() -> Tensor:
        cache.append(torch.full((NUM,), 7.0, device=source.device))
        return squares(source)

    engine.run_on_pool(fills, lane="steps", copied=copies_of)
    assert (first.is_closed, other.is_closed) == (True, False)
    again = engine.capture(lambda: squares(source), lane="steps")
    for recording in (again, other):
        recording.replay()
    assert bool((cache[0] == 7).all())
    engine.run_on_pool(fills, lane="steps", copied=copies_of)  # No pool is lent any more.
    assert not again.is_closed
    cache.clear()
    del recording, again, other, first
    engine.close()
    assert engine.pool_bytes == 0


@pytest.mark.gpu
def test_what_another_stream_still_uses_counts_as_left() -> None:
    engine = CudaEngine()
    source = torch.tensor([1.0, 2.0], device=engine.device)
    recording = engine.capture(lambda: squares(source), lane="steps")
    side = torch.cuda.Stream()

    def hands_over() -> Tensor:
        made = source.repeat(NUM)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            made.record_stream(side)
            torch.cuda._sleep(10_000_000)
            made.sum()
        return source * 2

    engine.run_on_pool(hands_over, lane="steps", copied=copies_of)
    assert side.query(), "memory in use by another stream was waited for"
    assert not recording.is_closed
    engine.close()
