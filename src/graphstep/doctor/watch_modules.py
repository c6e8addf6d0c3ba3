"""Watches calls of modules: those that no other one has, and wrappers that graphs do not see through."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from graphstep.doctor.notes import Notes


class ModuleWatch:
    """Looks at every module that is called, and at who calls it.

    Args:
        notes: where findings go.
    """

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._families: list[set[int]] = []
        self._inside = threading.get_ident()

    def know(self, roots: list[nn.Module]) -> None:
        """The outermost modules: what lies in one of them together may call each other."""
        self._families = [set(map(id, root.modules())) for root in roots]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the body, in this thread."""
        handle = register_module_forward_pre_hook(self._called)
        try:
            yield
        finally:
            handle.remove()

    def _called(self, module: nn.Module, _arguments: Any) -> None:
        if threading.get_ident() != self._inside or not self._notes.is_listening:
            return
        if isinstance(module, nn.DataParallel | torch.jit.ScriptModule):
            self._notes.add("GS-C003", type(module).__name__)
        if next(module.parameters(), None) is None:
            return
        caller = _caller_of(sys._getframe(1))
        if caller is None or any(each is module for each in caller.modules()):
            return
        if not self._belongs_to_known(module, caller):
            detail = f"{type(module).__name__}, called by {type(caller).__name__}"
            self._notes.add("GS-W008", "call of a module", detail=detail)

    def _belongs_to_known(self, module: nn.Module, caller: nn.Module) -> bool:
        return any(id(module) in family and id(caller) in family for family in self._families)


def _caller_of(frame: FrameType | None) -> nn.Module | None:
    """The module whose forward is running around the call that this frame belongs to."""
    num_seen = 0
    while frame is not None:
        if frame.f_code.co_name == "_call_impl" and isinstance(frame.f_locals.get("self"), nn.Module):
            num_seen += 1
            if num_seen == 2:
                caller = frame.f_locals["self"]
                return caller if isinstance(caller, nn.Module) else None
        frame = frame.f_back
    return None
