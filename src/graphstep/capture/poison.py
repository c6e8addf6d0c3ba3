"""NaN in memory that should not be read any more: whoever reads it after all gets a result that shows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from graphstep.engine import torch_private


def poison(tensors: Iterable[Tensor]) -> None:
    """Overwrite the values of floating-point tensors by NaN. Integers and flags are left alone: they may be indices."""
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.detach().fill_(float("nan"))


class SavedTensors:
    """What autograd keeps of a forward half for its backward half, to be poisoned at the end of the latter."""

    def __init__(self) -> None:
        self._saved: list[Tensor] = []

    @contextmanager
    def noted(self, is_wanted: bool) -> Iterator[None]:
        """Note what is saved in the body."""
        if not is_wanted:
            yield
            return

        def note(tensor: Tensor) -> Tensor:
            self._saved.append(tensor.detach())
            return tensor

        created = _Created()
        with torch.autograd.graph.saved_tensors_hooks(note, _same), created:
            yield
        self._saved = [tensor for tensor in self._saved if torch_private.storage_key(tensor) in created.keys]

    def poison(self, keep: Iterable[Tensor | None]) -> None:
        """Overwrite what was noted and made by the region itself, except what shares memory with ``keep``."""
        kept = {torch_private.storage_key(tensor) for tensor in keep if tensor is not None}
        seen: set[int] = set()
        for tensor in self._saved:
            key = torch_private.storage_key(tensor)
            if key not in kept and key not in seen:
                seen.add(key)
                poison([tensor])
        self._saved.clear()


class _Created(torch_private.DispatchMode):
    """Notes the storages that operations make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys: set[int] = set()
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        for tensor in _tensors([*args, *(kwargs or {}).values()]):
            key = torch_private.storage_key(tensor)
            if key not in self.keys:
                self._known.add(key)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors([result]):
            key = torch_private.storage_key(tensor)
            if key not in self._known:
                self.keys.add(key)
        return result


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _same(tensor: Tensor) -> Tensor:
    return tensor
