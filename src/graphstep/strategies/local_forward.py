"""What stands in place of a captured module's ``forward``, on the instance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from graphstep.errors import Problem
from graphstep.models.segments import SegmentedModule


class InstalledForward:
    """What stands in a module's ``__dict__`` while it is captured. Copies of it run their own forward."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], own: Callable[..., Any]) -> None:
        self._module, self._forward, self._own = module, forward, own
        self._entry = forward

    def enter_by(self, entry: Callable[..., Any] | None) -> None:
        """Call this in place of the captured forward, which it calls itself where it has to; ``None``: no longer."""
        self._entry = self._forward if entry is None else entry

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the captured module; under ``torch.compile`` what it stands for."""
        if torch.compiler.is_compiling():
            return self._own(*arguments, **named)
        return self._entry(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        """What the captured forward offers besides being called, such as ``reset``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._forward, name)

    @property
    def own(self) -> Callable[..., Any]:
        """The forward that it stands for."""
        return self._own

    def runs(self, forward: Callable[..., Any]) -> bool:
        """True if it stands for this one."""
        return self._forward == forward

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnForward, (self._module,)


class OwnForward:
    """The ``forward`` of the class, for a copy of a captured module: the graphs belong to the original."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the module as it is."""
        return type(self._module).forward(self._module, *arguments, **named)


def has_graphs(module: nn.Module) -> bool:
    """True while a strategy has replaced the forward of a module."""
    return isinstance(module.__dict__.get("forward"), InstalledForward)


@contextmanager
def graphs_left_out(modules: Iterable[nn.Module]) -> Iterator[None]:
    """In the body captured modules run their own forward, and their strategy is not told. Nothing may be in flight."""
    installed = [(module, module.__dict__["forward"]) for module in modules if has_graphs(module)]
    for module, forward in installed:
        module.__dict__["forward"] = forward.own
    try:
        yield
    finally:
        for module, forward in installed:
            module.__dict__["forward"] = forward


def own_forward(module: nn.Module) -> Callable[..., Any]:
    """A module's forward as it is now, found anew where the class has it, so that it follows a patched class."""
    own = module.__dict__.get("forward")
    return own if own is not None else OwnForward(module)


def forward_problem(path: str, module: nn.Module, *, by_segments: bool = True) -> Problem | None:
    """Why a module cannot be captured, whole or by its segments; ``None`` if it can."""
    own = module.__dict__.get("forward")
    if isinstance(own, InstalledForward):
        what, fix = "another strategy has captured it", "close that strategy first"
    elif not by_segments:
        return None  # Whatever stands there is what is captured.
    elif own is not None and not isinstance(own, OwnForward):
        what, fix = "its forward was replaced on the instance", "undo that before building the strategy, or use a hook"
    elif type(module).forward is not SegmentedModule.forward:
        what, fix = "its class has a forward of its own", "put what it does into segments, or name it in regions"
    else:
        return None
    return Problem("forward-not-segments", f"layer {path} cannot be captured: {what}", path, fix)
