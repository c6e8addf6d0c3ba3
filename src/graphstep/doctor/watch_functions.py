"""Watches calls of torch's functions: host reads that the dispatcher does not show, and tensors from the host."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from graphstep.capture.places import storage_of
from graphstep.doctor.notes import Notes
from graphstep.engine import torch_private
from graphstep.engine.assignments import DataAssignments
from graphstep.engine.host_reads import HostReadGuard
from graphstep.engine.refusals import Refusals
from graphstep.engine.tape_ops import tensors_in
from graphstep.errors import CaptureError

_CODES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "tolist": "GS-H005",
        "numpy": "GS-H004",
        "__array__": "GS-H004",
        "__dlpack__": "GS-H004",
        "cpu": "GS-H004",
        "__repr__": "GS-H003",
        "__format__": "GS-H003",
        "__reduce_ex__": "GS-H009",
        "__deepcopy__": "GS-H009",
        "untyped_storage": "GS-H009",
        "tensor": "GS-H006",
        "as_tensor": "GS-H006",
        "asarray": "GS-H006",
        "new_tensor": "GS-H006",
    }
)
"""What :class:`HostReadGuard` refuses, by the name of the function; ``GS-H011`` for the rest."""

_FROM_VALUES: Final = frozenset({torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, Tensor.new_tensor})
_FACTORIES: Final = frozenset(
    {
        *(torch.zeros, torch.ones, torch.empty, torch.full, torch.arange, torch.linspace, torch.logspace, torch.eye),
        *(torch.rand, torch.randn, torch.randint, torch.randperm, torch.tril_indices, torch.triu_indices),
    }
)
_INDEXED: Final = frozenset({Tensor.__getitem__, Tensor.__setitem__})
_BACKWARDS: Final = frozenset({Tensor.backward, torch.autograd.backward})
_LEAF_HOOKS: Final = frozenset({Tensor.register_hook, Tensor.register_post_accumulate_grad_hook})


class FunctionWatch(HostReadGuard):
    """Notes what the guard of the tape engine would refuse, lets it happen, and notes some things more."""

    def __init__(self, notes: Notes) -> None:
        super().__init__(Refusals(), DataAssignments())
        self._notes = notes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        notes = self._notes
        before, notes.function = notes.function, name
        is_quiet = notes.is_quiet
        try:
            self._look(func, name, args, kwargs)
            try:
                return super().__torch_function__(func, types, args, kwargs)
            except CaptureError as error:
                if not is_quiet:
                    operation = f"Tensor.{name}" if getattr(Tensor, name, None) is func else f"torch.{name}"
                    notes.add(_CODES.get(name, "GS-H011"), operation, fix=error.fix)
                notes.is_quiet = True
                return func(*args, **kwargs)
        finally:
            notes.function, notes.is_quiet = before, is_quiet

    def _look(self, func: Any, name: str, args: Any, kwargs: Any) -> None:
        notes = self._notes
        if func in _FROM_VALUES:
            self._from_values(func, name, args, kwargs)
        elif func in _FACTORIES:
            if kwargs.get("device") is None and kwargs.get("out") is None and not torch_private.has_default_device():
                notes.add("GS-T002", f"torch.{name} without device=", only_direct=True)
        elif func is Tensor.to or func is Tensor.cuda:
            if _names_device(func, args, kwargs) and notes.roles.is_batch(args[0]):
                notes.add("GS-T003", f"Tensor.{name}", only_direct=True, only_own=True)
        elif func in _INDEXED:
            if _indexes_by_values(args[1]):
                fix = "use a slice, or make a tensor of the positions before the step (register_buffer)"
                notes.add("GS-T001", "an index of Python numbers", fix=fix, only_direct=True)
        elif name == "__set__":
            self._assigned(func, args)
        elif func in _BACKWARDS:
            if kwargs.get("retain_graph") or (len(args) > 2 and args[2]):
                notes.add("GS-W010", f"{name}(retain_graph=True)", part="backward")
        elif func in _LEAF_HOOKS and args[0].is_leaf and notes.roles.is_old(args[0]):
            notes.add("GS-Y007", f"Tensor.{name}", only_direct=True)

    def _from_values(self, func: Any, name: str, args: Any, kwargs: Any) -> None:
        given = args[1] if func is Tensor.new_tensor and len(args) > 1 else args[0] if args else None
        data = kwargs.get("data", kwargs.get("obj", given))
        if not isinstance(data, Tensor) and not any(True for _ in tensors_in(data)):
            self._notes.add("GS-T001", f"torch.{name}", only_direct=True)

    def _assigned(self, func: Any, args: Any) -> None:
        if func.__self__ is Tensor.grad and isinstance(args[1], Tensor):
            self._notes.add("GS-W009", "assignment to .grad", only_direct=True)
        elif (
            func.__self__ is Tensor.data
            and (isinstance(args[0], nn.Parameter) or (args[0].is_leaf and args[0].requires_grad))
            and storage_of(args[0]) != storage_of(args[1])  # `p.data -= x` assigns the memory that it has.
        ):
            detail = self._notes.roles.name_of(args[0])
            self._notes.add("GS-W001", "assignment to .data", detail=detail)


def _indexes_by_values(index: Any) -> bool:
    """True if torch makes a tensor of a part of the index: a list of numbers, an array of numpy."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(
        isinstance(part, np.ndarray | range) or (isinstance(part, list) and _is_of_numbers(part)) for part in parts
    )


def _is_of_numbers(values: list[Any]) -> bool:
    return bool(values) and all(
        _is_of_numbers(each) if isinstance(each, list) else isinstance(each, int | np.integer) for each in values
    )


def _names_device(func: Any, args: Any, kwargs: Any) -> bool:
    if func is Tensor.cuda or "device" in kwargs:
        return True
    return any(isinstance(given, str | torch.device) for given in args[1:])
