"""Diagnosed programs set variables, seeds and hooks of the process: everything is put back."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def process_put_back() -> Iterator[None]:
    variables, python, numpy = dict(os.environ), random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Programs that are broken on purpose make torch warn.
        yield
    random.setstate(python)
    np.random.set_state(numpy)
    os.environ.clear()
    os.environ.update(variables)
