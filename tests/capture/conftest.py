"""The device and the session that the tests of the capture core run on: the tape on the CPU, CUDA graphs on a GPU."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator

import pytest
import torch
from tests.engine.reusing import memory_is_reused
from tests.waiting import wait_for

from graphstep.capture.session import GraphSession


@pytest.fixture(scope="session", autouse=True)
def objects_of_the_test_run_set_aside() -> Iterator[None]:
    """Every capture collects garbage first, which is slow with all that pytest and torch keep."""
    importlib.import_module("torch._dynamo")  # what optimizers import when they are first used
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def memory_is_reused_as_on_a_gpu() -> Iterator[None]:
    with memory_is_reused():
        yield


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def session(device: torch.device) -> Iterator[GraphSession]:
    """A session that, once closed, has to leave no memory of its pool behind."""
    before = private_pool_bytes(device)
    opened = GraphSession(device)
    yield opened
    opened.close()
    assert opened.report().pool_bytes == 0
    workspaces = getattr(opened.engine, "workspace_pool", None)
    # The thread of a backward pass that failed lets go of it a little later.
    is_free = wait_for(lambda: private_pool_bytes(device, workspaces) <= before, seconds=2.0)
    assert is_free, "memory of the pool outlives the session"


def private_pool_bytes(device: torch.device, left_out: object = None) -> int:
    if device.type != "cuda":
        return 0
    gc.collect()
    gc.collect()  # What autograd let go of in the first may hold more.
    torch.cuda.empty_cache()
    segments = [(tuple(s["segment_pool_id"]), s["total_size"]) for s in torch.cuda.memory_snapshot()]
    return sum(size for pool, size in segments if pool not in ((0, 0), left_out))
