"""The states of an engine, and what becomes of its cache and graphs in between."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


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
