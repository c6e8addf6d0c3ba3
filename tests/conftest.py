"""What all tests share: one thread a process, a fixed seed, and no GPU tests where there is no GPU."""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import pytest
import torch

from graphstep.native.build import Build

SEED = 1234


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    Build(os.environ).wait()  # Else it would be there for some tests, and not for others.
    if importlib.util.find_spec("hypothesis") is not None:
        from hypothesis import settings

        # No deadline: the first example of a test pays for lazy imports. Derandomized: a run can be repeated.
        settings.register_profile("graphstep", deadline=None, derandomize=True, max_examples=50)
        settings.load_profile("graphstep")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device: torch.cuda.is_available() is False")


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed the generators of torch (all devices) and numpy before each test, and give the seed to those who ask."""
    torch.manual_seed(SEED)
    np.random.seed(SEED)
    return SEED
