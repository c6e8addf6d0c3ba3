"""Random numbers that a recording cannot draw: on the host, and in a backward that is captured by itself."""

from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import torch

from graphstep.engine.compiler import DispatchMode
from graphstep.errors import CaptureError


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


class NoRandomness(DispatchMode):
    """Refuses random operations in the backward half of a region.

    Recompute puts the generator back to where it was in the forward, which is another recording: its state then is of
    no meaning in this one.

    Args:
        region: name for the error.
    """

    def __init__(self, region: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._region = region

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs or {}):
            raise CaptureError(
                f"the backward of this region draws random numbers ({func.name()}): activation recompute with dropout, "
                "which two recordings cannot do alike",
                where=self._region,
                fix="turn off recompute or dropout here, leave this module out of the captured ones, or use "
                "full_iteration",
            )
        return func(*args, **(kwargs or {}))


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """False for what is tagged as random and is not in this call."""
    if func.name().partition(".")[0].endswith("_backward"):
        return False  # That of an attention with dropout repeats its mask from a seed that the forward saved.
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return bool(
                (args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)) > 0
            )
    return True


def state_of(generator: Any) -> Any:
    """State of a generator of random numbers on the host, to compare; ``None`` for anything else."""
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return pickle.dumps(generator.get_state(legacy=False))
    if isinstance(generator, np.random.Generator):
        return pickle.dumps(generator.bit_generator.state)
    return None


def set_state(generator: Any, state: Any) -> None:
    """Give such a generator the state that :func:`state_of` told."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(pickle.loads(state))
    else:
        generator.bit_generator.state = pickle.loads(state)
