"""Batches from the host arrive whole and in order, and the host does not wait for the device."""

from __future__ import annotations

import pytest
import torch

from graphstep.capture.static_inputs import StaticInputs

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
_LONG = 500_000_000
"""Cycles: some tenths of a second."""


def batch(value: int, *, is_pinned: bool) -> dict[str, torch.Tensor]:
    tokens = torch.full((64, 128), value)
    mask = torch.full((64,), float(value))
    return {"tokens": tokens.pin_memory() if is_pinned else tokens, "mask": mask, "none": torch.tensor(value).cuda()}


@pytest.mark.parametrize("is_pinned", [True, False])
def test_each_step_sees_its_own_batch(is_pinned: bool) -> None:
    static = StaticInputs(batch(0, is_pinned=is_pinned), GPU)
    seen = []
    for value in range(12):
        given = batch(value, is_pinned=is_pinned)
        static.load(given)
        if not is_pinned:
            given["tokens"].fill_(-1)  # the caller may use its memory again at once
        if value % 3 == 0:
            torch.cuda._sleep(_LONG // 20)
        seen.append([tensor.clone() for tensor in static.arguments.values()])
    for value, tensors in enumerate(seen):
        assert all(bool((tensor == value).all()) for tensor in tensors)


@pytest.mark.parametrize("is_pinned", [True, False])
def test_the_host_does_not_wait(is_pinned: bool) -> None:
    given = batch(1, is_pinned=is_pinned)
    static = StaticInputs(given, GPU)
    static.load(given)
    torch.cuda.synchronize()
    done = torch.cuda.Event()
    torch.cuda._sleep(_LONG)
    done.record()
    for _ in range(3):
        static.load(given)
    assert not done.query(), "the device should still be at what came before"
    torch.cuda.synchronize()
    assert bool((static.arguments["tokens"] == 1).all())


def test_the_copy_runs_beside_the_work_before_it() -> None:
    given = {"tokens": torch.ones(64, 128).pin_memory()}
    static = StaticInputs(given, GPU)
    static.load(given)
    torch.cuda.synchronize()
    done, arrived = torch.cuda.Event(), torch.cuda.Event()
    torch.cuda._sleep(_LONG)
    done.record()
    static.load({"tokens": torch.full((64, 128), 2.0).pin_memory()})
    assert static._host is not None
    stream = static._host[1]._stream
    arrived.record(stream)
    arrived.synchronize()
    assert not done.query()
    torch.cuda.synchronize()
    assert bool((static.arguments["tokens"] == 2).all())
