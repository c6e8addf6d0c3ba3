"""The engines under test: the tape on the CPU, and CUDA graphs where there is a GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from graphstep.engine import CudaEngine, Engine, TapeEngine


@pytest.fixture(scope="package", autouse=True)
def collections_are_short() -> Iterator[None]:
    """Every capture collects once. What was loaded before the tests need not be looked at each time."""
    TapeEngine().capture(lambda: torch.ones(1) + 1)  # torch loads its compiler with the first dispatch mode
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(params=["tape", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Either engine. A test leaves no memory behind."""
    engine = CudaEngine() if request.param == "cuda" else TapeEngine()
    yield engine
    engine.close()
    assert engine.pool_bytes == 0


@pytest.fixture
def tape() -> Iterator[TapeEngine]:
    """The tape engine, for what only a tape can see or has to do."""
    engine = TapeEngine()
    yield engine
    engine.close()
    assert engine.pool_bytes == 0
