"""Assignments to ``tensor.data`` inside a captured function: a replay does not repeat them."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from torch import Tensor

from graphstep.engine import torch_private
from graphstep.engine.user_frame import user_line


@dataclass(slots=True)
class DataAssignments:
    """The memory that tensors had before their first assignment, so that it can be given back."""

    where: str = ""
    """The user's line that made the first one."""
    _before: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def note(self, tensor: Tensor) -> None:
        """Call before ``tensor.data`` is assigned."""
        self.where = self.where or str(user_line() or "")
        self._before.setdefault(id(tensor), (tensor, torch_private.plain_alias(tensor)))

    def restore(self, own: Container[int]) -> bool:
        """Give tensors their memory back, except those whose memory was in ``own``; tells whether any had moved."""
        has_moved = False
        for tensor, before in self._before.values():
            key = torch_private.storage_key(before)
            if key not in own and torch_private.storage_key(tensor) != key:
                has_moved = True
                tensor.data = before
        self._before.clear()
        return has_moved
