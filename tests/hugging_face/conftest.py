"""Models of transformers are tested on the tape of the CPU and, where there is a GPU, on CUDA graphs."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator

import pytest
import torch
from tests.engine.reusing import memory_is_reused


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
