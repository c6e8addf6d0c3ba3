"""Collectives on gloo: recorded, and repeated by each replay with the values of that moment."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.engine.collectives import PROGRAMS, failure_after_start, run_all
from tests.engine.programs import assert_replays_equal_eager
from torch import multiprocessing

from graphstep.engine import TapeEngine

pytestmark = [
    pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.usefixtures("alone")
def test_alone(tape: TapeEngine, name: str) -> None:
    assert_replays_equal_eager(tape, PROGRAMS[name])


@pytest.mark.usefixtures("alone")
def test_failure_after_start_alone() -> None:
    failure_after_start()


@pytest.mark.usefixtures("alone")
def test_collective_is_not_repeated_by_the_capture(tape: TapeEngine) -> None:
    """The argument is as before, although the collective ran once."""
    x = torch.ones(3)
    recording = tape.capture(lambda: dist.all_reduce(x.mul_(2)))
    assert x.tolist() == [1.0] * 3
    for _ in range(2):
        recording.replay()
    assert x.tolist() == [4.0] * 3


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes found; both run all programs, as starting them takes longer than that."""
    folder = tmp_path_factory.mktemp("ranks")
    context = multiprocessing.spawn(run_all, args=(2, str(folder)), nprocs=2, join=False)
    ends_before = time.monotonic() + 100
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < ends_before, "the processes did not end"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return folder


@pytest.mark.parametrize("name", [*PROGRAMS, "failure_after_start"])
def test_two_processes(reports: Path, name: str) -> None:
    for rank in range(2):
        report = (reports / f"{name}.{rank}").read_text(encoding="utf-8")
        assert report == "", f"rank {rank}:\n{report}"
