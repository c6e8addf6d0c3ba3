"""What the watchers share during a run: findings so far, whose tensors are whose, and what is going on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from graphstep.capture.places import storage_of
from graphstep.doctor.findings import FindingList, Severity, SourceLine
from graphstep.doctor.kinds import KINDS
from graphstep.doctor.lines import LOADING, Ground, Spot
from graphstep.engine.tape_ops import tensors_in

_NAN_CHECKS: Final = ("isnan", "isinf", "isfinite", "is_nan", "is_inf", "is_finite")


@dataclass(slots=True)
class Roles:
    """The tensors that are there before a run, by what they are to the step."""

    parameters: dict[int, str] = field(default_factory=dict)
    """Storage -> path."""
    trained: dict[int, tuple[str, Tensor]] = field(default_factory=dict)
    """Of those, the ones that want a gradient."""
    buffers: dict[int, str] = field(default_factory=dict)
    gradients: set[int] = field(default_factory=set)
    states: set[int] = field(default_factory=set)
    """Of optimizers."""
    batch: set[int] = field(default_factory=set)

    @classmethod
    def of(
        cls, modules: Iterable[tuple[str, nn.Module]], optimizers: Iterable[Optimizer], batch: Iterable[Tensor]
    ) -> Roles:
        """Whose is whose at this moment."""
        found = cls()
        for path, module in modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    found._add_parameter(f"{path}.{name}" if path else name, parameter)
            for name, buffer in module._buffers.items():
                if buffer is not None and (key := storage_of(buffer)) is not None:
                    found.buffers[key] = f"{path}.{name}" if path else name
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    found._add_parameter("", parameter)
            found.states.update(_keys(_values(optimizer.state)))
            found.states.update(_keys(value for group in optimizer.param_groups for value in _values(group)))
        found.states -= found.parameters.keys()
        found.batch.update(_keys(batch))
        return found

    def _add_parameter(self, path: str, parameter: Tensor) -> None:
        key = storage_of(parameter)
        if key is None:
            return
        self.parameters.setdefault(key, path or "a parameter")
        if parameter.requires_grad:
            self.trained.setdefault(key, (self.parameters[key], parameter))
        if parameter.grad is not None:
            self.gradients.update(_keys([parameter.grad]))

    def is_batch(self, tensor: Any) -> bool:
        """True for a tensor of the batch, or a view of one."""
        return storage_of(tensor) in self.batch

    def is_old(self, tensor: Tensor) -> bool:
        """True for a parameter."""
        return storage_of(tensor) in self.parameters

    def has(self, key: int) -> bool:
        """True for the storage of a tensor that has a role."""
        return (
            key in self.parameters
            or key in self.buffers
            or key in self.gradients
            or key in self.states
            or key in self.batch
        )

    def name_of(self, tensor: Tensor) -> str:
        """The path of a parameter."""
        return self.parameters.get(storage_of(tensor) or 0, "")


@dataclass(slots=True)
class Notes:
    """Findings of the runs, and the state of the one that is under way."""

    findings: FindingList
    ground: Ground
    roles: Roles = field(default_factory=Roles)
    is_listening: bool = False
    """False in runs that only prepare."""
    function: str = ""
    """The torch function that was called last from Python."""
    is_stepping: bool = False
    """An optimizer is in its step."""
    is_quiet: bool = False
    """What goes on inside has been told already."""

    def spot(self) -> Spot:
        """Where the code is that runs."""
        return self.ground.spot()

    def add(
        self,
        code: str,
        operation: str,
        *,
        detail: str = "",
        fix: str = "",
        part: str = "",
        spot: Spot | None = None,
        severity: Severity | None = None,
        only_direct: bool = False,
        only_own: bool = False,
    ) -> Spot | None:
        """Note something about the line that is at work; returns where that is, unless it does not count.

        Args:
            code: of the kind.
            operation: what the line does.
            detail: what was seen.
            fix: a better one than that of the kind.
            part: if it is not the one that is under way.
            spot: where, if it is not here.
            severity: another one than that of the kind.
            only_direct: it counts only where the user's code does it itself, not through torch's Python.
            only_own: it counts only in the user's own files.
        """
        if not self.is_listening:
            return None
        spot = spot or self.spot()
        if LOADING in spot.parts:  # Whatever a loader does, it should not be read there.
            code, operation, detail, fix, part, severity = "GS-D004", "a loader is read", "", "", "data", None
            only_direct = False
        is_in_backward = spot.is_in_backward and spot.part == "backward"
        # The line is the call that starts it: autograd does this, and no code of the user's.
        is_of_autograd = is_in_backward and ".backward(" in spot.line.text
        is_indirect = not spot.is_direct or is_of_autograd
        is_foreign = not spot.is_own or self.ground.has_libraries
        if (only_direct and is_indirect) or (only_own and is_foreign):
            return None
        if is_in_backward:
            made = self.ground.made_in_forward() if is_of_autograd else None
            if is_of_autograd and made is None and self.findings.has_in_backward(code):
                return None  # It was told in a run in which the lines of the forward were known.
            if made is not None:
                detail = "; ".join(filter(None, [detail, f"in the backward that {_short(spot.line)} starts"]))
                spot = Spot(made, spot.is_own, spot.is_direct, spot.inside, spot.parts, spot.around, True)
        self.findings.add(
            KINDS[code],
            spot.line,
            operation,
            detail="; ".join(filter(None, [detail, spot.inside])),
            fix=fix,
            part=part or spot.part,
            severity=severity,
        )
        return spot

    def looks_for_nan(self, line: SourceLine) -> bool:
        """True if the text of the line asks whether something is finite."""
        return any(name in line.text for name in _NAN_CHECKS)


def _short(line: SourceLine) -> str:
    return f"line {line.line}"


def _keys(values: Iterable[Any]) -> set[int]:
    return {key for tensor in values if (key := storage_of(tensor)) is not None}


def _values(owner: Mapping[Any, Any]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in owner.values():
        found += _values(value) if isinstance(value, Mapping) else tensors_in(value)
    return found
