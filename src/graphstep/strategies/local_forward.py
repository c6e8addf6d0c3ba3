"""What stands in place of a captured layer's ``forward``, on the instance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from graphstep.errors import Problem
from graphstep.models.segments import SegmentedModule


class InstalledForward:
    """What stands in a layer's ``__dict__`` while it is captured. Copies of the layer run their own forward instead."""

    def __init__(self, layer: SegmentedModule, forward: Callable[..., Tensor]) -> None:
        self._layer, self._forward = layer, forward

    def __call__(self, *arguments: Any, **named: Any) -> Tensor:
        """Run the captured layer."""
        return self._forward(*arguments, **named)

    def runs(self, forward: Callable[..., Tensor]) -> bool:
        """True if it stands for this one."""
        return self._forward == forward

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnForward, (self._layer,)


class OwnForward:
    """The ``forward`` of the class, for a copy of a captured layer: the graphs belong to the original."""

    def __init__(self, layer: SegmentedModule) -> None:
        self._layer = layer

    def __call__(self, *arguments: Any, **named: Any) -> Tensor:
        """Run the layer as it is."""
        return type(self._layer).forward(self._layer, *arguments, **named)


def forward_problem(path: str, layer: SegmentedModule) -> Problem | None:
    """Why a layer cannot be run as the list of its segments; ``None`` if it can."""
    own = layer.__dict__.get("forward")
    if own is None or isinstance(own, OwnForward):
        if type(layer).forward is SegmentedModule.forward:
            return None
        what, fix = "its class has a forward of its own", "put what it does into segments"
    elif isinstance(own, InstalledForward):
        what, fix = "another strategy has captured it", "close that strategy first"
    else:
        what, fix = "its forward was replaced on the instance", "undo that before building the strategy, or use a hook"
    return Problem("forward-not-segments", f"layer {path} cannot be captured: {what}", path, fix)
