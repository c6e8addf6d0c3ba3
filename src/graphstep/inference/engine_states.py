"""The states of an engine, what becomes of its cache and graphs in between, and whether new weights fit."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from torch import Tensor


class EngineState(enum.Enum):
    """READY <-> SUSPENDED, and CLOSED from either."""

    READY = "ready"
    SUSPENDED = "suspended"
    CLOSED = "closed"


class CacheMode(enum.Enum):
    """What becomes of the cache while an engine is suspended."""

    PERSIST = "persist"
    """It stays, and so do the graphs."""
    OFFLOAD = "offload"
    """What is in use goes to the host and comes back. Graphs are captured again."""
    RECOMPUTE = "recompute"
    """It goes; running requests compute it anew. Graphs are captured again."""


@dataclass(slots=True)
class WeightUpdate:
    """What a change of weights did; complete when the ``with`` of `DynamicEngine.weight_update` ends."""

    moved: list[str] = field(default_factory=list)
    """Weights that are not where they were, in words. Empty: all addresses were kept, and so were the graphs."""
    num_recomputed: int = 0
    """Running requests whose keys and values are computed again."""


def misfit(name: str, own: Tensor | None, new: object) -> str | None:
    """Say why a new value cannot be copied into a weight, or ``None``.

    Args:
        name: of the weight.
        own: what the model has by that name.
        new: what is to be copied into it.
    """
    if own is None:
        return f"{name}: unknown"
    if not isinstance(new, Tensor):
        return f"{name}: expected a tensor, got {type(new).__name__}"
    if own.shape != new.shape:
        return f"{name}: expected {tuple(own.shape)}, got {tuple(new.shape)}"
    if own.is_floating_point() and not new.is_floating_point():
        return f"{name}: expected {own.dtype} or another floating type, got {new.dtype}"
    return None
