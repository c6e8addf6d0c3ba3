"""Watches operations, forward and backward: what a capture refuses, writes to old tensors, stale copies."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from graphstep.doctor.lines import CHECKPOINT, CLIPPING, OPTIMIZER, SCALER, Spot
from graphstep.doctor.notes import Notes
from graphstep.engine import torch_private
from graphstep.engine.compiler import DispatchMode
from graphstep.engine.refusals import Refusals
from graphstep.engine.tape_ops import (
    OperationTable,
    OperationTraits,
    Replay,
    has_boolean_index,
    tensors_in,
    written_tensors,
)
from graphstep.engine.tape_rules import CaptureRules
from graphstep.errors import CaptureError

_NUMBERS: Final = frozenset({"item", "__int__", "__float__", "__index__", "__complex__", "__len__", "__round__"})
_BRANCHES: Final = frozenset({"__bool__", "__nonzero__", "is_nonzero", "__contains__"})
_COMPARISONS: Final = frozenset({"equal", "allclose", "is_same_size"})
_READ_IN_BACKWARD: Final = frozenset({"aten::prod", "aten::cumprod", "aten::_linalg_det"})
"""Operations whose backward on a GPU reads values. Under a dispatch mode torch takes another way, so it is not seen."""
_BACKWARDS: Final = frozenset({"backward", "grad"})
_NOT_OPERATIONS: Final = frozenset({"profiler", "prim"})
_MOST_COMPARED: Final = 1 << 26
"""Entries of a tensor that is compared with a weight of its size."""


class OperationWatch(DispatchMode):
    """Notes what the rules of the tape engine refuse, and lets it happen."""

    supports_higher_order_operators = True

    def __init__(self, notes: Notes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._notes = notes
        self._table = OperationTable()
        self._held: dict[int, torch_private.WeakStorage] = {}
        """Keeps keys of storages of this run from being given to others."""
        self._created: dict[int, None] = {}
        self._constants: dict[int, None] = {}
        self._rules = CaptureRules(Refusals(), self._created, self._constants)
        self._derived: dict[int, tuple[torch_private.WeakStorage, str]] = {}
        self._refreshed: dict[int, torch_private.WeakStorage] = {}
        """Tensors from outside that the step writes: they follow the weights by its own doing."""
        self._compared: set[int] = set()
        self._has_backward = False
        self.used: set[int] = set()
        """Storages that were there before this run and were used in it."""
        self.written_buffers: dict[str, None] = {}
        self.num_operations = 0
        self.has_collectives = False

    def begin(self) -> None:
        """A run begins."""
        self._held.clear()
        self._created.clear()
        self._constants.clear()
        self._compared.clear()
        self.used.clear()
        self._has_backward = False
        self.num_operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch_private.unwraps_itself(types):
            return NotImplemented
        if isinstance(func, torch._ops.HigherOrderOperator):
            return self._inside(torch_private.dense_kernel(func) or func, args, kwargs)
        if func.namespace in _NOT_OPERATIONS:
            return func(*args, **kwargs)
        traits = self._table.of(func)
        if traits.is_composite:
            return self._inside(func.decompose, args, kwargs)
        self.num_operations += 1
        self.has_collectives = self.has_collectives or traits.replay is Replay.COLLECTIVE
        self._has_backward = self._has_backward or torch_private.backward_pass() is not None
        given = self._note_inputs(traits, args, kwargs)
        if not self._notes.is_quiet:
            self._check(traits, args, kwargs)
        if traits.name.partition(".")[0] in _READ_IN_BACKWARD and torch.is_grad_enabled() and args[0].requires_grad:
            self._notes.add("GS-H012", traits.name, part="backward")
        if traits.is_random:
            self._random(traits, args, kwargs)
        if traits.written and traits.replay is not Replay.COLLECTIVE:
            self._writes(traits, args, kwargs)
        result = func(*args, **kwargs)
        self._note_results(traits, given, result)
        return result

    def _inside(self, kernel: Any, args: Any, kwargs: Any) -> Any:
        with self:
            return kernel(*args, **kwargs)

    # ----- what a capture refuses

    def _check(self, traits: OperationTraits, args: Any, kwargs: Any) -> None:
        try:
            self._rules.check(traits, args, kwargs)
        except CaptureError as error:
            self._refused(traits, error, args)

    def _refused(self, traits: OperationTraits, error: CaptureError, args: Any) -> None:
        notes = self._notes
        if not notes.is_listening:
            return
        spot = notes.spot()
        if spot.is_in_backward and traits.writes_index and args[2].numel() == 1:
            return  # Zeros where the forward has written a number: on a GPU that is a number, too.
        function = notes.function
        if spot.is_in_backward and function in _BACKWARDS:
            function = ""  # It is an operation of autograd's own.
        if spot.is_in_backward and torch.is_anomaly_check_nan_enabled():
            return  # It is the check of the user's anomaly detection.
        code = self._code_of(traits, function, spot, args)
        own_fix = code in ("GS-H001", "GS-H002", "GS-H007", "GS-H008", "GS-S001", "GS-S002", "GS-S003")
        is_special = own_fix or code.startswith("GS-O") or code == "GS-H011"
        name = f"{function} ({traits.name})" if function and not function.startswith("__set") else traits.name
        notes.add(code, name, fix="" if is_special else error.fix, spot=spot)

    def _code_of(self, traits: OperationTraits, function: str, spot: Spot, args: Any) -> str:
        if traits.has_dynamic_shape:
            return _shape_code(traits, function)
        index_code = "GS-S005" if has_boolean_index(args) else "GS-T004"
        is_read = function in _NUMBERS or function in _BRANCHES
        # The first that holds.
        rules = (
            (traits.changes_storage, "GS-S006"),
            (traits.writes_index, index_code),
            (traits.changes_metadata, "GS-S007"),
            (SCALER in spot.parts, "GS-O004"),
            (CLIPPING in spot.parts, "GS-O003"),
            (OPTIMIZER in spot.parts, "GS-O005"),
            (function in _COMPARISONS, "GS-H008"),
            (is_read and self._notes.looks_for_nan(spot.line), "GS-H007"),
            (function in _NUMBERS, "GS-H001"),
            (function in _BRANCHES, "GS-H002"),
        )
        return next((code for holds, code in rules if holds), "GS-H011")

    # ----- random numbers

    def _random(self, traits: OperationTraits, args: Any, kwargs: Any) -> None:
        named = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
        default = torch_private.generator_key(torch.default_generator)
        if any(torch_private.generator_key(generator) != default for generator in named):
            self._notes.add("GS-R002", traits.name)
        if torch_private.backward_pass() is not None and self._notes.is_listening:
            spot = self._notes.spot()
            if CHECKPOINT in spot.around:
                self._notes.add("GS-R004", traits.name, spot=spot)

    # ----- memory that is older than the run

    def _note_inputs(self, traits: OperationTraits, args: Any, kwargs: Any) -> list[int]:
        given = []
        for tensor in tensors_in([*args, *kwargs.values()]):
            key = self._key(tensor)
            if key is None:
                continue
            given.append(key)
            if traits.replay is Replay.CONSTANT and key not in self.used and key not in self._created:
                self._hold(key, tensor)
                self._constants[key] = None
                self._created[key] = None
            elif key not in self._created:
                self.used.add(key)
                self._stale(key, tensor, traits)
        return given

    def _note_results(self, traits: OperationTraits, given: list[int], result: Any) -> None:
        trained, derived = self._notes.roles.trained, self._derived
        is_derived = bool(given) and not traits.is_random and all(key in trained or key in derived for key in given)
        for tensor in tensors_in(result):
            key = self._key(tensor)
            if key is None or key in given or key in self.used:
                continue
            self._created[key] = None
            self._refreshed.pop(key, None)
            self._hold(key, tensor)
            if is_derived:
                source = next(trained[k][0] if k in trained else derived[k][1] for k in given)
                derived[key] = torch_private.WeakStorage(tensor), source
            else:
                derived.pop(key, None)

    def _stale(self, key: int, tensor: Tensor, traits: OperationTraits) -> None:
        """A tensor from before the run that was computed from a weight."""
        roles = self._notes.roles
        if roles.has(key) or key in self._refreshed or traits.name == "aten::detach":
            return
        if key not in self._derived and key not in self._compared:
            self._compared.add(key)
            source = self._twin(tensor)
            if source is not None:
                self._derived[key] = torch_private.WeakStorage(tensor), source
        if key in self._derived:
            self._notes.add("GS-W004", f"{traits.name} reads it", detail=f"computed from {self._derived[key][1]}")

    def _twin(self, tensor: Tensor) -> str | None:
        """The weight whose values a tensor has, in another order or type."""
        if tensor.numel() < 2 or tensor.numel() > _MOST_COMPARED or not tensor.is_floating_point():
            return None
        alike = [
            (name, weight)
            for name, weight in self._notes.roles.trained.values()
            if weight.numel() == tensor.numel() and weight.device == tensor.device
        ]
        if not alike:
            return None
        with torch.no_grad():
            mine = tensor.detach()
            least, most = torch.aminmax(mine)
            if torch.equal(least, most):
                return None
            for name, weight in alike:
                theirs = weight.detach().to(mine.dtype)
                if not all(map(torch.equal, torch.aminmax(theirs), (least, most))):
                    continue
                if torch.equal(mine.flatten().sort().values, theirs.flatten().sort().values):
                    return name
        return None

    def _writes(self, traits: OperationTraits, args: Any, kwargs: Any) -> None:
        roles = self._notes.roles
        for tensor in written_tensors(traits, args, kwargs):
            key = self._key(tensor)
            if key is None or key in self._created:
                continue
            if not roles.has(key):
                self._refreshed[key] = torch_private.WeakStorage(tensor)
            if key in roles.buffers:
                self.written_buffers[roles.buffers[key]] = None
                if torch_private.backward_pass() is not None and self._notes.is_listening:
                    spot = self._notes.spot()
                    if CHECKPOINT in spot.around:
                        self._notes.add("GS-W006", traits.name, detail=roles.buffers[key], spot=spot)
            elif key in roles.parameters:
                if not self._has_backward:
                    spot = self._notes.spot()
                    if OPTIMIZER not in spot.around:
                        self._notes.add(
                            "GS-W002", traits.name, detail=roles.parameters[key], spot=spot, only_direct=True
                        )
            elif key in roles.batch:
                self._notes.add("GS-W007", traits.name)
            elif not roles.has(key) and not traits.changes_storage and not traits.changes_metadata:
                spot = self._notes.spot()
                if not spot.is_in_backward or ".backward(" not in spot.line.text:  # Else it is a library's.
                    self._notes.add("GS-W005", traits.name, spot=spot, only_direct=True, only_own=True)

    def _key(self, tensor: Tensor) -> int | None:
        return torch_private.storage_key(tensor) if torch_private.has_plain_memory(tensor) else None

    def _hold(self, key: int, tensor: Tensor) -> None:
        if key not in self._held:
            self._held[key] = torch_private.WeakStorage(tensor)


def _shape_code(traits: OperationTraits, function: str) -> str:
    name = traits.name.partition("::")[2].partition(".")[0]
    if name.startswith("nonzero") or function == "nonzero":
        return "GS-S001"
    if name.startswith(("unique", "_unique")):
        return "GS-S003"
    return "GS-S002" if name.startswith("index") else "GS-S004"
