"""Process-wide random state and determinism, changed for a stretch of code and put back after it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

WORKSPACE_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
"""Environment variable that makes cuBLAS deterministic."""
DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
"""Its values under which cuBLAS is deterministic. Source: cuBLAS documentation, "Results reproducibility"."""


@contextlib.contextmanager
def deterministic_algorithms(enabled: bool) -> Iterator[None]:
    """Make operations without a deterministic kernel raise, inside the context; restores the former setting."""
    if not enabled:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warned_before = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned_before)


def seeded_random_state(seed: int, device: torch.device) -> dict[str, Tensor]:
    """Return what :func:`random_state` would return after ``torch.manual_seed(seed)``; touches no default generator."""
    state = {"cpu": torch.Generator().manual_seed(seed).get_state()}
    if device.type == "cuda":
        state["cuda"] = torch.Generator(device).manual_seed(seed).get_state()
    return state


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of the default generators: ``cpu`` always, ``cuda`` when training there; uint8 CPU tensors."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Put back what :func:`random_state` returned; a generator that is not in ``state`` is left alone."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextlib.contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """Undo what the code inside draws from the default generators; generators that drew nothing are not touched."""
    before = random_state(device)
    try:
        yield
    finally:
        after = random_state(device)
        restore_random_state({k: v for k, v in before.items() if not torch.equal(v, after[k])}, device)
