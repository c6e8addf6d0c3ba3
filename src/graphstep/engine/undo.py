"""Undo of everything that a function wrote into tensors that existed before it ran."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from graphstep.engine import torch_private
from graphstep.engine.tape_ops import OperationTable, tensors_in, written_tensors


class UndoLog:
    """Copies of storages, each taken just before its first write.

    Restoring writes only storages whose content changed, and does so without touching version counters: a needless
    bump would make caches of derived tensors refresh and so hide that they are stale.
    """

    def __init__(self) -> None:
        self._saved: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held in copies."""
        return sum(copy.nbytes for _, copy in self._saved.values())

    def __contains__(self, storage_key: int) -> bool:
        return storage_key in self._saved

    def save(self, tensor: Tensor) -> None:
        """Keep the content of the tensor's whole storage, unless it is kept already."""
        key = torch_private.storage_key(tensor)
        if key not in self._saved:
            content = _all_bytes(tensor)
            self._saved[key] = (content, content.clone())

    def restore(self) -> None:
        """Write the kept contents back where they differ, then forget them."""
        for content, copy in self._saved.values():
            if not _same_bytes(content, copy):
                content.copy_(copy)
        self._saved.clear()


class WriteObserver(TorchDispatchMode):
    """Feeds an :class:`UndoLog` while a function runs, and notes what the function touches.

    Kernels launched past the dispatcher are not seen; tensors known to be written by such are saved by the caller.
    """

    def __init__(self, log: UndoLog, table: OperationTable) -> None:
        super().__init__()
        self._log = log
        self._table = table
        self._created: dict[int, torch_private.WeakStorage] = {}
        self.generators: list[torch.Generator] = []
        self.leaves: list[Tensor] = []
        self._leaf_ids: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        traits = self._table.of(func)
        for tensor in written_tensors(traits, args, kwargs):
            if torch_private.storage_key(tensor) not in self._created:
                self._log.save(tensor)
        self._note(args)
        self._note(kwargs.values())
        result = func(*args, **kwargs)
        given = {torch_private.storage_key(t) for t in tensors_in([*args, *kwargs.values()])}
        for tensor in tensors_in(result):
            key = torch_private.storage_key(tensor)
            if key not in given and key not in self._created:
                self._created[key] = torch_private.WeakStorage(tensor)
        return result

    def _note(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Generator):
                if not any(value is known for known in self.generators):
                    self.generators.append(value)
                continue
            for tensor in tensors_in(value):
                if tensor.requires_grad and tensor.is_leaf and id(tensor) not in self._leaf_ids:
                    self._leaf_ids.add(id(tensor))
                    self.leaves.append(tensor)


def _all_bytes(tensor: Tensor) -> Tensor:
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage())


def _same_bytes(left: Tensor, right: Tensor) -> bool:
    if left.device.type != "cpu":
        # Comparing would wait for the device; a copy is as cheap and the version counter is not the user's.
        return False
    return bool(torch.equal(left, right))
