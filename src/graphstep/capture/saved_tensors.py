"""What a captured region makes, and what autograd keeps of it between the two halves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from graphstep.engine import torch_private
from graphstep.engine.compiler import DispatchMode


class CreatedStorages(DispatchMode):
    """Notes the storages that operations make while it is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._created: dict[int, torch_private.WeakStorage] = {}
        self._given: set[int] = set()

    def __contains__(self, tensor: Tensor) -> bool:
        return torch_private.storage_key(tensor) in self._created

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        for tensor in _tensors([*args, *(kwargs or {}).values()]):
            key = torch_private.storage_key(tensor)
            if key not in self._created:
                self._given.add(key)
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors([result]):
            key = torch_private.storage_key(tensor)
            if key not in self._given and key not in self._created:
                # Held weakly, so that no later storage is taken for this one.
                self._created[key] = torch_private.WeakStorage(tensor)
        return result


def saved_storages(outputs: Iterable[Tensor]) -> set[int]:
    """Keys of the storages that autograd has saved for a backward pass from ``outputs``, as far as nodes tell."""
    found: set[int] = set()
    for node in nodes_behind(outputs):
        values = [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
        values.append(getattr(node, "saved_tensors", ()))
        found.update(map(torch_private.storage_key, _tensors(values)))
    return found


def nodes_behind(outputs: Iterable[Tensor], *, ends: Iterable[Any] = ()) -> list[Any]:
    """All nodes of the autograd graph that a backward pass from ``outputs`` runs through.

    Args:
        outputs: any tensors; leaves have no node.
        ends: nodes to stop at, or ``None``, which counts as none: they and what lies behind them are left out.
    """
    left_out = set(ends)
    seen: dict[Any, None] = dict.fromkeys(left_out)
    waiting = [output.grad_fn for output in outputs if output.grad_fn is not None]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen[node] = None
            waiting.extend(following for following, _ in node.next_functions if following is not None)
    return [node for node in seen if node not in left_out]


def with_memory_of_their_own(gradients: Sequence[Tensor | None], created: CreatedStorages) -> Iterator[Tensor | None]:
    """Gradients that others may be added to: copies of those that share memory with anything else."""
    seen: set[int] = set()
    for gradient in gradients:
        if gradient is None:
            yield None
            continue
        key = torch_private.storage_key(gradient)
        is_shared = key in seen or gradient not in created or 0 in gradient.stride()
        seen.add(key)
        yield gradient.clone(memory_format=torch.contiguous_format) if is_shared else gradient


class SavedTensors:
    """What autograd saves in a forward half for the backward half, kept to be poisoned at the end of the latter."""

    def __init__(self) -> None:
        self.created = CreatedStorages()
        """What the forward half has made."""
        self._saved: dict[int, Tensor] = {}

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note in the body what is made and saved."""

        def note(tensor: Tensor) -> Tensor:
            self._saved.setdefault(torch_private.storage_key(tensor), tensor.detach())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, _same), self.created:
            yield

    def poison(self, keep: Iterable[Tensor | None]) -> None:
        """Overwrite what was saved and made by the region itself, except what shares memory with ``keep``."""
        kept = {torch_private.storage_key(tensor) for tensor in keep if tensor is not None}
        dead = [t for key, t in self._saved.items() if key not in kept and t in self.created]
        poison(dead)
        self._saved.clear()


def poison(tensors: Iterable[Tensor]) -> None:
    """NaN in memory that should not be read any more: whoever reads it after all gets a result that shows it.

    Integers and flags are left alone: they may be indices.
    """
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.detach().fill_(float("nan"))


def _tensors(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _same(tensor: Tensor) -> Tensor:
    return tensor
