"""Which modules and optimizers a function of the user's uses: seen while it runs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from graphstep.engine.compiler import compiled_code_off


class StepParts:
    """The modules and optimizers of a step: those that are given, and those seen in its eager runs.

    Modules are not looked for where they are given, or where one is under ``torch.compile``: it would have to compile
    around the hooks that see them.

    Args:
        modules: all modules; if there are none, they are looked for.
        optimizers: known from the start.
    """

    def __init__(self, modules: Iterable[nn.Module] = (), optimizers: Iterable[Optimizer] = ()) -> None:
        self._called: dict[int, nn.Module] = {id(module): module for module in modules}
        self._looks_for_modules = not self._called
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

    def add_modules(self, modules: Iterable[nn.Module]) -> None:
        """Those that are used without being called, if modules are looked for."""
        if self._looks_for_modules:
            self._called.update((id(module), module) for module in modules)

    def __len__(self) -> int:
        return len(self._called) + len(self._stepped)

    @contextmanager
    def watching(self, on_step: Callable[[Optimizer], None] | None = None) -> Iterator[None]:
        """Note what runs in the body, in this thread. torch has these hooks for the whole process only.

        Args:
            on_step: called with each optimizer before its first step in the body.
        """
        stepped: set[int] = set()
        inside = threading.get_ident()

        def note_module(module: nn.Module, _arguments: Any) -> None:
            if threading.get_ident() == inside:
                self._called.setdefault(id(module), module)

        def note_optimizer(optimizer: Optimizer, _arguments: Any, _named: Any) -> None:
            if threading.get_ident() == inside:
                self._stepped.setdefault(id(optimizer), optimizer)
                if on_step is not None and id(optimizer) not in stepped:
                    stepped.add(id(optimizer))
                    on_step(optimizer)

        handles = [register_optimizer_step_pre_hook(note_optimizer)]
        is_looking = self._looks_for_modules
        if is_looking:
            handles.append(register_module_forward_pre_hook(note_module))
        try:
            with compiled_code_off() if is_looking else nullcontext():
                yield
        finally:
            for handle in handles:
                handle.remove()
        if is_looking and any(map(_is_compiled, self._called.values())):
            self._looks_for_modules = False


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
