"""Which module draws how many random numbers in an eager run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphstep.engine import torch_private
from graphstep.engine.compiler import DispatchMode
from graphstep.engine.tape_ops import tensors_in


class Draw(NamedTuple):
    """One random operation."""

    module: str
    operation: str
    num_elements: int


class _Draws(DispatchMode):
    """Notes random operations while it is active, each with the module that runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[Draw] = []
        self._running: list[str] = []

    def enter(self, path: str, _module: nn.Module, _arguments: Any) -> None:
        """A module begins."""
        self._running.append(path)

    def leave(self, _module: nn.Module, _arguments: Any, _result: Any) -> None:
        """It ends."""
        self._running.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch_private.unwraps_itself(types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
            first: Tensor | None = next(iter(tensors_in(result)), None)
            number = 0 if first is None else first.numel()
            self.draws.append(Draw(self._running[-1] if self._running else "", func.name(), number))
        return result


def draws_of(run: Callable[[], Any], modules: Sequence[tuple[str, nn.Module]]) -> list[Draw]:
    """The random operations of a run, in order."""
    mode = _Draws()
    handles: list[Any] = []
    try:
        for path, module in modules:
            handles.append(module.register_forward_pre_hook(partial(mode.enter, path)))
            handles.append(module.register_forward_hook(mode.leave, always_call=True))
        with mode:
            run()
    finally:
        for handle in handles:
            handle.remove()
    return mode.draws


def first_other_draw(runs: Sequence[Sequence[Draw]]) -> str | None:
    """The module of the first random operation that some runs of a step have more often than others, if any."""
    for draw in dict.fromkeys(draw for run in runs for draw in run):
        if len({list(run).count(draw) for run in runs}) > 1:
            return draw.module
    return None
