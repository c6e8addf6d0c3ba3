"""Random numbers that Python code draws on the host: a recording cannot repeat the draw, only what came of it."""

from __future__ import annotations

import pickle
import random

import numpy as np
import torch


class HostRandomness:
    """States of the host's global generators: Python's, numpy's and, beside a GPU, torch's for the CPU.

    Args:
        device: where captures run. On the CPU, torch's generator is the device's own and no business of this class.
    """

    def __init__(self, device: torch.device) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state(legacy=False)
        self._torch = torch.default_generator.get_state() if device.type != "cpu" else None

    def restore(self) -> list[str]:
        """Put back the generators that were used since, and name them."""
        drawn = []
        if random.getstate() != self._python:
            random.setstate(self._python)
            drawn.append("Python's random module")
        if pickle.dumps(np.random.get_state(legacy=False)) != pickle.dumps(self._numpy):
            np.random.set_state(self._numpy)
            drawn.append("numpy.random")
        if self._torch is not None and not torch.equal(torch.default_generator.get_state(), self._torch):
            torch.default_generator.set_state(self._torch)
            drawn.append("torch's CPU generator")
        return drawn
