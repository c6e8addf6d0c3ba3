"""Which modules and optimizers a function of the user's uses: seen while it runs."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class StepParts:
    """The modules and optimizers of a step: those that are given, and those seen in its eager runs.

    Args:
        modules: known from the start.
        optimizers: known from the start.
    """

    def __init__(self, modules: Iterable[nn.Module] = (), optimizers: Iterable[Optimizer] = ()) -> None:
        self._called: dict[int, nn.Module] = {id(module): module for module in modules}
        self._stepped: dict[int, Optimizer] = {id(optimizer): optimizer for optimizer in optimizers}

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """All optimizers, in the order of first use."""
        return tuple(self._stepped.values())

    def modules(self) -> tuple[tuple[str, nn.Module], ...]:
        """The outermost modules, in the order of first use, with the names of their classes, numbered if need be."""
        inside = {id(m) for called in self._called.values() for m in called.modules() if m is not called}
        roots = [module for module in self._called.values() if id(module) not in inside]
        number = Counter(type(module).__name__ for module in roots)
        seen: Counter[str] = Counter()
        named = []
        for module in roots:
            name = type(module).__name__
            named.append((name if number[name] == 1 else f"{name}[{seen[name]}]", module))
            seen[name] += 1
        return tuple(named)

    def __len__(self) -> int:
        return len(self._called) + len(self._stepped)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what runs in the body, in this thread. torch has these hooks for the whole process only."""
        inside = threading.get_ident()

        def note_module(module: nn.Module, _arguments: Any) -> None:
            if threading.get_ident() == inside:
                self._called.setdefault(id(module), module)

        def note_optimizer(optimizer: Optimizer, _arguments: Any, _named: Any) -> None:
            if threading.get_ident() == inside:
                self._stepped.setdefault(id(optimizer), optimizer)

        handles = [register_module_forward_pre_hook(note_module), register_optimizer_step_pre_hook(note_optimizer)]
        try:
            with warnings.catch_warnings():
                # These hooks do not mind: a module that is noted twice is noted.
                warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")
                yield
        finally:
            for handle in handles:
                handle.remove()
