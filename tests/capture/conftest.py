"""The device and the session that the tests of the capture core run on: the tape on the CPU, CUDA graphs on a GPU."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator

import pytest
import torch

from graphstep.capture.session import GraphSession


@pytest.fixture(scope="session", autouse=True)
def objects_of_the_test_run_set_aside() -> Iterator[None]:
    """Every capture collects garbage first, which is slow with all that pytest and torch keep."""
    importlib.import_module("torch._dynamo")  # what optimizers import when they are first used
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def session(device: torch.device) -> Iterator[GraphSession]:
    """A session that, once closed, has to leave no memory of its pool behind."""
    opened = GraphSession(device)
    pool = getattr(opened.engine, "_pool", None)
    yield opened
    opened.close()
    assert opened.report().pool_bytes == 0
    if pool is not None:
        gc.collect()
        torch.cuda.empty_cache()
        left = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == tuple(pool)]
        assert left == [], "private-pool memory outlives the session"
