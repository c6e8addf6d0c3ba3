"""States of engines and recordings: what may be called when, and what holds afterwards."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from tests.engine.programs import run_replay
from torch import Tensor

from graphstep.engine import CudaEngine, Engine, Recording, TapeEngine, engine_for
from graphstep.errors import ConfigError, LifecycleError


def new_engine(engine: Engine) -> Engine:
    """Another engine for the same device."""
    return engine_for(engine.device)


def test_engine_and_recording_keep_the_contract(engine: Engine) -> None:
    assert isinstance(engine, Engine)
    assert engine.name == ("cuda" if engine.device.type == "cuda" else "tape")
    x = torch.ones(1000, device=engine.device)
    recording = engine.capture(lambda: x * 2 + 1)
    assert isinstance(recording, Recording)
    assert recording.num_operations in (None, 2, 3)
    assert recording.nbytes >= 2 * 4000 or engine.device.type == "cuda"
    assert engine.pool_bytes >= recording.nbytes
    assert not recording.is_closed
    assert repr(recording.result.device) == repr(engine.device)


def test_replay_after_close_is_refused(engine: Engine) -> None:
    recording = engine.capture(lambda: torch.ones(3, device=engine.device) * 2)
    run_replay(engine, recording)
    recording.close()
    assert recording.is_closed
    assert recording.result is None
    assert recording.nbytes == 0
    with pytest.raises(LifecycleError, match="closed"):
        recording.replay()
    recording.close()


def test_engine_closes_its_recordings(engine: Engine) -> None:
    x = torch.ones(3, device=engine.device)
    recordings = [engine.capture(lambda k=k: x * k) for k in range(3)]
    run_replay(engine, recordings[2])
    engine.close()
    engine.close()
    assert all(recording.is_closed for recording in recordings)
    assert engine.pool_bytes == 0
    with pytest.raises(LifecycleError, match="closed"):
        recordings[0].replay()
    with pytest.raises(LifecycleError, match="closed"):
        engine.capture(lambda: x * 2)


def test_released_result_keeps_its_memory(engine: Engine) -> None:
    x, kept = torch.ones(3, device=engine.device), torch.zeros(3, device=engine.device)

    def step() -> Tensor:
        y = x * 2
        kept.copy_(y + 1)
        return y

    recording = engine.capture(step)
    recording.release_result()
    assert recording.result is None
    x.fill_(5)
    run_replay(engine, recording)
    assert kept.tolist() == [11.0] * 3


def test_dropped_recording_frees_its_memory(tape: TapeEngine) -> None:
    x = torch.ones(100)
    recording = tape.capture(lambda: x * 2)
    assert tape.pool_bytes == 400
    reference = weakref.ref(recording)
    del recording
    gc.collect()
    assert reference() is None
    assert tape.pool_bytes == 0


def test_lanes_share_no_memory(engine: Engine) -> None:
    """Captured one after another into lanes of their own, replayed in any order: results that are kept stay apart."""
    x = torch.ones(64, device=engine.device)
    recordings = [engine.capture(lambda k=k: (x * k).exp().log(), lane=k) for k in range(1, 4)]
    for index in (2, 0, 1):
        run_replay(engine, recordings[index])
    for k, recording in enumerate(recordings, 1):
        torch.testing.assert_close(recording.result, torch.full_like(x, k))
    recordings[0].close()
    run_replay(engine, recordings[1])
    torch.testing.assert_close(recordings[1].result, torch.full_like(x, 2.0))


def test_a_lane_is_replayed_in_the_order_of_capture(engine: Engine) -> None:
    """Within a lane memory is handed on: results that are kept stay apart in the order of capture."""
    x = torch.ones(64, device=engine.device)
    recordings = [engine.capture(lambda k=k: (x * k).exp().log()) for k in range(1, 4)]
    for _ in range(2):
        for recording in recordings:
            run_replay(engine, recording)
        for k, recording in enumerate(recordings, 1):
            torch.testing.assert_close(recording.result, torch.full_like(x, k))


def test_one_recording_continues_another(engine: Engine) -> None:
    """The result of one is read by the next without a copy, as forward and backward of a pair do."""
    x = torch.ones(4, device=engine.device)
    first = engine.capture(lambda: x * 3)
    second = engine.capture(lambda: first.result + 1)
    for value in (2.0, 5.0):
        x.fill_(value)
        first.replay()
        run_replay(engine, second)
        assert second.result.tolist() == [3 * value + 1] * 4


def test_backward_in_a_recording_of_its_own(engine: Engine) -> None:
    weight, x = torch.randn(4, 4, device=engine.device, requires_grad=True), torch.randn(2, 4, device=engine.device)
    with engine.capture_stream():
        (x @ weight).tanh().sum().backward()
    weight.grad = torch.zeros_like(weight)
    forward = engine.capture(lambda: (x @ weight).tanh().sum())
    backward = engine.capture(forward.result.backward)
    for seed in range(3):
        torch.manual_seed(seed)
        x.copy_(torch.randn_like(x))
        weight.grad.zero_()
        forward.replay()
        run_replay(engine, backward)
        found = weight.grad.clone()
        expected = torch.autograd.grad((x @ weight).tanh().sum(), weight)[0]
        assert torch.equal(found, expected)


def test_capture_inside_a_capture_is_refused(engine: Engine) -> None:
    x = torch.ones(3, device=engine.device)
    for inner in (engine, new_engine(engine)):
        with pytest.raises(LifecycleError, match="already under way"):
            engine.capture(lambda inner=inner: inner.capture(lambda: x * 2))
        assert not engine.is_capturing
    assert engine.capture(lambda: x * 2).result is not None


def test_replay_inside_a_capture_is_refused(engine: Engine) -> None:
    x, other = torch.ones(3, device=engine.device), new_engine(engine)
    recordings = [engine.capture(lambda: x * 2), other.capture(lambda: x * 3)]
    for recording in recordings:
        with pytest.raises(LifecycleError, match="inside a capture"):
            engine.capture(recording.replay)
        run_replay(engine, recording)
    assert [recording.result.tolist() for recording in recordings] == [[2.0] * 3, [3.0] * 3]
    other.close()


def test_close_inside_a_capture_is_refused(engine: Engine) -> None:
    x = torch.ones(3, device=engine.device)
    with pytest.raises(LifecycleError, match="capturing"):
        engine.capture(lambda: [x * 2, engine.close()])
    assert engine.capture(lambda: x * 2).result is not None


def test_two_engines_do_not_meet(engine: Engine) -> None:
    x, other = torch.ones(3, device=engine.device), new_engine(engine)
    mine, theirs = engine.capture(lambda: x * 2), other.capture(lambda: x * 3)
    other.close()
    other.close()
    assert theirs.is_closed
    assert not mine.is_closed
    run_replay(engine, mine)
    assert mine.result.tolist() == [2.0] * 3
    assert other.pool_bytes == 0
    assert engine.pool_bytes > 0


def test_capture_stream_is_ordered_with_the_callers(engine: Engine) -> None:
    x = torch.ones(4, device=engine.device)
    for _ in range(3):
        x.mul_(2)
        with engine.capture_stream():
            x.add_(1)
            with engine.capture_stream():
                x.add_(1)
        x.mul_(3)
    engine.synchronize()
    assert x.tolist() == [(((1 * 2 + 2) * 3 * 2 + 2) * 3 * 2 + 2) * 3.0] * 4
    with pytest.raises(KeyError), engine.capture_stream():
        raise KeyError("the body's own")


def test_borrowed_view_is_the_same_memory(engine: Engine) -> None:
    recording = engine.capture(lambda: (torch.ones(3, 4, device=engine.device) * 2).t()[1:])
    view = engine.borrowed_view(recording.result)
    assert view.data_ptr() == recording.result.data_ptr()
    assert (view.shape, view.stride(), view.dtype) == ((3, 3), (1, 4), torch.float32)
    assert not view.requires_grad
    run_replay(engine, recording)
    assert view.tolist() == [[2.0] * 3] * 3


def test_engine_fits_the_device(engine: Engine) -> None:
    other = new_engine(engine)
    assert type(other) is type(engine)
    other.close()


def test_no_engine_for_other_devices() -> None:
    with pytest.raises(ConfigError, match="no engine for device meta"):
        engine_for("meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_no_gpu_is_named() -> None:
    with pytest.raises(ConfigError, match="no CUDA device"):
        CudaEngine()
