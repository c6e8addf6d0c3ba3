"""A session owns all graph state: capture, failure, closing, and nothing shared with another session."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from graphstep.capture.session import GraphSession
from graphstep.errors import CaptureError, LifecycleError


def state_of(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def test_closing_twice_is_fine(session: GraphSession) -> None:
    assert not session.is_closed
    session.close()
    session.close()
    assert session.is_closed


def test_a_closed_session_refuses_everything_but_its_report(session: GraphSession, device: torch.device) -> None:
    stats = session.stats("region", "layer")
    session.close()
    uses = (
        lambda: session.capture(stats, lambda: None),
        lambda: session.observe(lambda: None),
        lambda: session.watch_run(lambda: None),
        lambda: session.watch([("", nn.Linear(2, 2))]),
        session.__enter__,
        session.require_open,
    )
    for use in uses:
        with pytest.raises(LifecycleError) as caught:
            use()
        assert caught.value.fix
    session.report()


def test_with_closes(device: torch.device) -> None:
    with GraphSession(device) as session:
        x = torch.ones(2, device=device)
        recording = session.capture(session.stats("r", "layer"), lambda: x + 1)
    assert session.is_closed
    assert recording.is_closed
    with pytest.raises(LifecycleError):
        recording.replay()


def test_collection_closes(device: torch.device) -> None:
    session = GraphSession(device)
    x = torch.ones(2, device=device)
    recording = session.capture(session.stats("r", "layer"), lambda: x + 1)
    gone = weakref.ref(session)
    del session
    gc.collect()
    assert gone() is None
    assert recording.is_closed


PROGRAM = """
import atexit, sys
atexit.register(lambda: print("closed" if recording.is_closed else "open"))  # first registered: runs last
import torch
from torch import nn
from graphstep.capture.session import GraphSession
session = GraphSession(sys.argv[1])
linear = nn.Linear(4, 4).to(sys.argv[1])
x = torch.ones(2, 4, device=sys.argv[1])
recording = session.capture(session.stats("r", "layer"), lambda: linear(x).sum())
recording.replay()
"""


def test_the_end_of_the_process_closes_quietly(device: torch.device) -> None:
    source = Path(__file__).parents[2] / "src"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(source)!r})\n{PROGRAM}", device.type],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.split() == ["closed"]


def test_two_sessions_do_not_meet(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    with GraphSession(device) as first, GraphSession(device) as second:
        one = first.capture(first.stats("r", "layer"), lambda: x + 1)
        two = second.capture(second.stats("r", "layer"), lambda: x * 5)
        one.replay()
        first.close()
        assert one.is_closed
        assert not two.is_closed
        for value in (1.0, 2.0):
            x.fill_(value)
            two.replay()
            assert torch.equal(two.result, x * 5)
        assert second.report().num_recordings == 1
        assert len(second.manifest) == 0


def test_a_failed_capture_leaves_the_session_usable(session: GraphSession, device: torch.device) -> None:
    stats = session.stats("r", "layer")
    x = torch.ones(3, device=device)
    buffer = torch.zeros(3, device=device)

    def fails() -> Tensor:
        buffer.add_(torch.rand(3, device=device))
        return x * buffer.sum().item()

    before = state_of(device)
    with pytest.raises(CaptureError):
        session.capture(stats, fails)
    assert all(map(torch.equal, state_of(device), before))
    assert not buffer.any()
    assert session.report().num_recordings == 0
    recording = session.capture(stats, lambda: x + 1)
    recording.replay()
    assert torch.equal(recording.result, x + 1)


def test_a_capture_inside_a_capture_is_refused(session: GraphSession, device: torch.device) -> None:
    stats = session.stats("r", "layer")
    x = torch.ones(3, device=device)
    with pytest.raises(LifecycleError):
        session.capture(stats, lambda: session.capture(stats, lambda: x + 1))
    session.capture(stats, lambda: x + 1).replay()


def test_release_frees_and_counts(session: GraphSession, device: torch.device) -> None:
    x = torch.ones(1000, device=device)
    stats = session.stats("r", "layer")
    recordings = [session.capture(stats, lambda: x + 1) for _ in range(3)]
    session.release(recordings[:2], stats)
    assert [recording.is_closed for recording in recordings] == [True, True, False]
    assert stats.num_recordings == 1
    session.release_all()
    assert recordings[2].is_closed
    assert session.report().num_recordings == 0
    assert session.report().rows[0].pool_bytes == 0
    if device.type == "cpu":
        assert session.engine.pool_bytes == 0
    session.capture(stats, lambda: x + 1).replay()


def test_what_a_recording_reads_lives_as_long_as_it(session: GraphSession, device: torch.device) -> None:
    stats = session.stats("r", "layer")
    x, constant = torch.ones(3, device=device), [torch.full((3,), 7.0, device=device)]
    observation = session.observe(lambda: x * constant[0])
    recording = session.capture(stats, lambda: x * constant[0], observation=observation)
    del observation
    constant.clear()
    noise = [torch.full((3,), 99.0, device=device) for _ in range(100)]
    recording.replay()
    assert torch.equal(recording.result, x * 7)
    assert len(noise) == 100


DRAWS = {
    "random": random.random,
    "numpy": lambda: float(np.random.rand()),
    "torch": lambda: float(torch.rand(())),
}


@pytest.mark.parametrize("source", DRAWS)
def test_numbers_drawn_on_the_host_are_refused(session: GraphSession, device: torch.device, source: str) -> None:
    """A replay would repeat the layer that was dropped, the scale that was drawn."""
    if source == "torch" and device.type == "cpu":
        pytest.skip("the device's own generator")
    x = torch.ones(3, device=device)
    before = random.getstate(), np.random.get_state()[2], torch.get_rng_state()
    with pytest.raises(CaptureError, match="drew random numbers on the host") as caught:
        session.capture(session.stats("r", "layer"), lambda: x * DRAWS[source]())
    assert source in caught.value.what
    assert random.getstate() == before[0]
    assert np.random.get_state()[2] == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert session.report().num_recordings == 0


def test_time_is_counted_also_when_the_body_fails(session: GraphSession) -> None:
    stats = session.stats("r", "layer")

    def fail() -> None:
        with session.timed(stats):
            raise RuntimeError("the body")

    with pytest.raises(RuntimeError, match="the body"):
        fail()
    assert stats.capture_seconds > 0


def test_modules_of_jit_are_refused(session: GraphSession) -> None:
    scripted: nn.Module = torch.jit.script(nn.Linear(2, 2))  # type: ignore[no-untyped-call]
    model = nn.Sequential(nn.Linear(2, 2), scripted)
    session.watch([("model", model[0])])
    with pytest.raises(CaptureError, match=r"modules of torch\.jit cannot be captured") as caught:
        session.watch([("model", model)])
    assert caught.value.where == "model.1"
