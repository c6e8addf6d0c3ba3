"""Other threads: their work is not recorded, and they cannot capture into the same engine at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from tests.engine.programs import run_replay
from torch import Tensor

from graphstep.engine import Engine, TapeEngine
from graphstep.errors import LifecycleError


def in_thread(function: Callable[[], None]) -> None:
    """Run in another thread, wait, and raise what it raised."""
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_work_of_another_thread_is_not_recorded(engine: Engine) -> None:
    x, host = torch.ones(3, device=engine.device), torch.zeros(2)
    seen: list[object] = []

    def elsewhere() -> None:
        host.add_(1)
        seen.extend([host.sum().item(), host.tolist(), repr(host), engine.is_capturing])

    def step() -> Tensor:
        y = x * 2
        in_thread(elsewhere)
        return y + 1

    recording = engine.capture(step)
    assert seen == [2.0, [1.0, 1.0], "tensor([1., 1.])", False]
    x.fill_(4)
    run_replay(engine, recording)
    assert recording.result.tolist() == [9.0] * 3
    assert host.tolist() == [1.0, 1.0]


def test_capture_from_another_thread_is_refused(engine: Engine) -> None:
    x = torch.ones(3, device=engine.device)

    def elsewhere() -> None:
        with pytest.raises(LifecycleError, match="already under way"):
            engine.capture(lambda: x * 3)

    recording = engine.capture(lambda: [x * 2, in_thread(elsewhere)][0])
    run_replay(engine, recording)
    assert recording.result.tolist() == [2.0] * 3


def test_capture_in_a_thread_of_its_own(engine: Engine) -> None:
    """A recording made in one thread is replayed in another."""
    x, recordings = torch.ones(3, device=engine.device, requires_grad=True), []
    x.grad = torch.zeros_like(x)
    in_thread(lambda: recordings.append(engine.capture(lambda: (x * x).sum().backward())))
    for _ in range(2):
        run_replay(engine, recordings[0])
    assert x.grad.tolist() == [4.0] * 3


def test_captures_in_two_threads_at_once(tape: TapeEngine) -> None:
    """Two engines capture in two threads at once and do not notice each other, in whatever order they end."""
    ask, other = torch.cuda.is_current_stream_capturing, TapeEngine()
    inside, first_done = threading.Event(), threading.Event()
    results: dict[str, list[float]] = {}
    x = torch.ones(3)

    def outlasts() -> None:
        def step() -> Tensor:
            y = x * 3
            inside.set()
            assert first_done.wait(30)
            assert torch.cuda.is_current_stream_capturing()
            return y + 1

        recording = other.capture(step)
        recording.replay()
        results["other"] = recording.result.tolist()

    thread = threading.Thread(target=outlasts)

    def step() -> Tensor:
        thread.start()
        assert inside.wait(30)
        return x * 2

    recording = tape.capture(step)
    first_done.set()
    thread.join(30)
    recording.replay()
    assert results == {"other": [4.0] * 3}
    assert recording.result.tolist() == [2.0] * 3
    assert recording.num_operations == 1
    assert torch.cuda.is_current_stream_capturing is ask
    other.close()
