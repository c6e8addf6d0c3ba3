"""A capture leaves the process and all tensors as they were, and a replay runs no Python of the function."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from tests.engine.programs import rng_state, run_replay, snapshot
from torch import Tensor, nn

from graphstep.engine import Engine, TapeEngine
from graphstep.errors import CaptureError


def test_buffers_and_gradients_are_as_before(engine: Engine) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).to(engine.device)
    count = torch.zeros(2, device=engine.device)
    x = torch.randn(6, 3, device=engine.device)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    def step() -> Tensor:
        count.add_(1)
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach()

    with engine.capture_stream():
        step()  # the first use of a library may allocate
    gradients = [parameter.grad for parameter in model.parameters()]
    tensors = [count, x, *model.parameters(), *model.buffers(), *gradients]
    before, state = snapshot(*tensors), rng_state(engine)
    recording = engine.capture(step)
    assert snapshot(*tensors) == before
    assert rng_state(engine) == state
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    run_replay(engine, recording)
    assert count.tolist() == [2.0, 2.0]
    assert model[1].num_batches_tracked.item() == 2


def test_unchanged_tensors_are_not_written(tape: TapeEngine) -> None:
    """A needless write would bump the version by which others know that derived tensors are stale."""
    read, written = torch.ones(3), torch.ones(3)
    versions = read._version, written._version
    recording = tape.capture(lambda: written.add_(read))
    assert read._version == versions[0]
    before = written._version
    recording.replay()
    assert written.tolist() == [2.0] * 3
    assert (read._version, written._version) == (versions[0], before)


def test_replay_runs_no_python_of_the_function(engine: Engine) -> None:
    calls: list[str] = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
            calls.append("forward")
            return x * 2

        @staticmethod
        def backward(ctx, gradient: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
            calls.append("backward")
            return gradient * 2

    leaf = torch.ones(3, device=engine.device, requires_grad=True)
    leaf.grad = torch.zeros_like(leaf)
    leaf.register_hook(lambda _: calls.append("hook"))

    def step() -> None:
        calls.append("step")
        Counted.apply(leaf).sum().backward()

    recording = engine.capture(step)
    assert calls == ["step", "forward", "backward", "hook"]
    for _ in range(3):
        run_replay(engine, recording)
    assert len(calls) == 4
    assert leaf.grad.tolist() == [6.0] * 3


def test_subclass_hears_nothing_of_replays(tape: TapeEngine) -> None:
    calls: list[str] = []

    class Heard(Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            calls.append(getattr(func, "__name__", ""))
            return super().__torch_function__(func, types, args, kwargs or {})

    x = torch.ones(3).as_subclass(Heard)
    recording = tape.capture(lambda: [(x * 2).sum()])
    assert calls == ["mul", "sum"]
    recording.replay()
    assert len(calls) == 2


@pytest.fixture
def collector() -> Iterator[None]:
    enabled, thresholds = gc.isenabled(), gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    (gc.enable if enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.usefixtures("collector")
def test_collector_is_held_and_left_as_it_was(engine: Engine, enabled: bool, fails: bool) -> None:
    gc.set_threshold(1, 1, 1)
    (gc.enable if enabled else gc.disable)()
    inside = []

    def step() -> Tensor:
        inside.append(gc.isenabled())
        if fails:
            raise KeyError("the function's own")
        return torch.ones(2, device=engine.device) * 2

    if fails:
        with pytest.raises(KeyError):
            engine.capture(step)
    else:
        engine.capture(step)
    assert inside == [False]
    assert gc.isenabled() is enabled
    assert gc.get_threshold() == (1, 1, 1)


@pytest.mark.usefixtures("collector")
def test_old_garbage_is_collected_before_the_capture(engine: Engine) -> None:
    """A destructor that ran inside would become part of the capture, or break it."""
    when: list[bool] = []

    class Old:
        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            when.append(engine.is_capturing)

    gc.set_threshold(1, 1, 1)
    gc.disable()
    Old()
    engine.capture(lambda: [torch.ones(2, device=engine.device) for _ in range(50)])
    assert when == [False]


@pytest.mark.parametrize("fails", [True, False])
def test_libraries_are_told_of_the_capture(engine: Engine, fails: bool) -> None:
    ask = torch.cuda.is_current_stream_capturing
    answers = []

    def step() -> Tensor:
        answers.append((torch.cuda.is_current_stream_capturing(), engine.is_capturing))
        if fails:
            raise KeyError("the function's own")
        return torch.ones(2, device=engine.device) + 1

    assert not engine.is_capturing
    if fails:
        with pytest.raises(KeyError):
            engine.capture(step)
    else:
        engine.capture(step)
    assert answers == [(True, True)]
    assert not engine.is_capturing
    assert torch.cuda.is_current_stream_capturing is ask


def test_casts_of_autocast_do_not_cross_the_capture(engine: Engine) -> None:
    """A cast made before would be stale in replays; one made inside would be undefined outside."""
    weight, x = torch.randn(4, 4, device=engine.device, requires_grad=True), torch.randn(2, 4, device=engine.device)
    with torch.autocast(engine.device.type, dtype=torch.bfloat16):
        before = snapshot(x @ weight)
        recording = engine.capture(lambda: [(x @ weight).detach()])
        assert snapshot(x @ weight) == before
        with torch.no_grad():
            weight.mul_(2)
        run_replay(engine, recording)
    with torch.autocast(engine.device.type, dtype=torch.bfloat16):
        assert snapshot(*recording.result) == snapshot(x @ weight)
    assert torch.is_autocast_cache_enabled()


MODES: Mapping[str, Callable[[str], AbstractContextManager[Any]]] = {
    "no_grad": lambda device: torch.no_grad(),
    "inference": lambda device: torch.inference_mode(),
    "autocast": lambda device: torch.autocast(device, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("captured_in", ["plain", *MODES])
@pytest.mark.parametrize("replayed_in", ["plain", *MODES])
def test_replay_does_not_depend_on_the_mode_it_runs_in(engine: Engine, captured_in: str, replayed_in: str) -> None:
    """It does what was captured, and what it wrote during the capture was undone, in any mode."""
    x, weight = torch.randn(4, 4, device=engine.device), torch.randn(4, 4, device=engine.device)
    total = torch.zeros(4, 4, device=engine.device)

    def step() -> Tensor:
        total.add_(1)
        return (x @ weight).t().reshape(-1).cumsum(0) + total[0, 0]

    modes = {"plain": lambda device: nullcontext(), **MODES}
    with modes[captured_in](engine.device.type):
        expected = snapshot(step())
        total.zero_()
        recording = engine.capture(step)
    assert total.sum() == 0
    with modes[replayed_in](engine.device.type):
        run_replay(engine, recording)
    assert snapshot(recording.result) == expected
    assert total.sum() == 16


def test_settings_are_repeated_and_put_back(tape: TapeEngine) -> None:
    """Some operations ask for the grad mode or the default dtype: a replay gives them those of the capture."""

    def step() -> list[Tensor]:
        torch.set_default_dtype(torch.float64)
        results = [torch.rand(2), torch.arange(3) / 7]
        torch.set_default_dtype(torch.float32)
        return [*results, torch.arange(3) / 7]

    torch.manual_seed(0)
    expected = snapshot(*step())
    recording = tape.capture(step)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.no_grad():
            recording.replay()
            assert not torch.is_grad_enabled()
        assert torch.get_default_dtype() is torch.float16
    finally:
        torch.set_default_dtype(torch.float32)
    assert snapshot(*recording.result) == expected


def test_assigned_data_is_given_back(tape: TapeEngine) -> None:
    x, address = torch.ones(3), 0

    def swap() -> Tensor:
        x.data = x * 2
        return x + 1

    address = x.data_ptr()
    with pytest.raises(CaptureError, match=r"assigned \.data"):
        tape.capture(swap)
    assert x.data_ptr() == address
    assert x.tolist() == [1.0] * 3


def test_data_assigned_for_a_while_is_fine(tape: TapeEngine) -> None:
    x = torch.ones(3)

    def swap() -> Tensor:
        kept = x.data
        x.data = kept * 2
        result = x + 1
        x.data = kept
        return result

    recording = tape.capture(swap)
    x.fill_(4)
    recording.replay()
    assert recording.result.tolist() == [9.0] * 3
