"""Weight decay of optimizers in a captured step, from numbers on the device."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from graphstep.strategies.fused_decay import Formula, formula_of_kernel

Key = tuple[int, int]
"""An optimizer, by identity, and the position of a group in it."""


class DecaysInside:
    """Lets a graph follow the weight decay of AdamW and its relatives, which take it as a number of the host.

    Their decay is the first thing that a step does to the weights and to nothing else, so it can be done just before
    the step, which is told that there is none. Optimizers made of single operations decay like this always. The fused
    kernel does it by itself at no cost, so there it is done only once the number has been seen to change; and only for
    float32 and float64, as the kernel does not round half-precision weights between decay and update. How it rounds
    differs between devices and versions of torch: :func:`formula_of_kernel` finds out.

    Args:
        optimizers: those of the step.
        device: where the step runs.
    """

    def __init__(self, optimizers: Iterable[Optimizer], device: torch.device) -> None:
        self._optimizers = [optimizer for optimizer in optimizers if type(optimizer) in _DECOUPLED]
        self._device = device
        self._numbers: dict[Key, Tensor] = {}
        self._written: dict[Key, float] = {}
        self._seen: dict[Key, Any] = {}
        """The number in the latest body of :meth:`on_device`."""
        self._scheduled: set[Key] = set()
        """Groups whose number has changed from one body to the next, or after a capture."""
        self._formulas: dict[torch.dtype, Formula | None] = {}
        self._done: dict[Key, tuple[Optimizer, int]] = {}
        """Groups that have decayed like this in the latest body of :meth:`on_device`."""

    def noted(self) -> DecaysInside:
        """Just after a capture: the same, knowing what its graph follows."""
        made = copy.copy(self)
        made._done = dict(self._done)
        return made

    def follows(self, optimizer: Optimizer, index: int) -> bool:
        """Whether the captured step reads the weight decay of a group from the device."""
        return (id(optimizer), index) in self._done

    def has_changed(self, optimizer: Optimizer, index: int) -> None:
        """The weight decay of a group is another one than in a graph that does not follow it."""
        self._scheduled.add((id(optimizer), index))

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Decay from numbers on the device in the steps of the body, where learning rates are there too."""
        self._done = {}
        for optimizer in self._optimizers:  # Here, since the body may be a capture.
            for index, group in enumerate(optimizer.param_groups):
                number = group.get("weight_decay")
                if self._seen.setdefault((id(optimizer), index), number) != number:
                    self._scheduled.add((id(optimizer), index))
                self._seen[id(optimizer), index] = number
                if self._is_done_here(optimizer, index, group):
                    self._write(optimizer, index)
        aside: list[tuple[dict[str, Any], float]] = []

        def give_back(*_arguments: Any) -> None:
            while aside:
                group, number = aside.pop()
                group["weight_decay"] = number

        def decay(optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            if any(value is not None for value in (*arguments[1:], *named.values())):
                return  # A closure computes gradients first, with weights that have not decayed.
            for index, group in enumerate(optimizer.param_groups):
                key, number = (id(optimizer), index), group.get("weight_decay")
                if not self._is_done_here(optimizer, index, group) or self._written.get(key) != number:
                    continue
                formula = self._formula_of(group) if group.get("fused") else None
                _decay(optimizer, group, self._numbers[key], formula)
                self._done[key] = optimizer, index
                aside.append((group, group["weight_decay"]))
                group["weight_decay"] = 0.0

        hooks = []
        for optimizer in self._optimizers:
            hooks += [optimizer.register_step_pre_hook(decay), optimizer.register_step_post_hook(give_back)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            give_back()

    def write(self) -> None:
        """Before a replay: have the numbers that its graph follows on the device."""
        for optimizer, index in self._done.values():
            self._write(optimizer, index)

    def _write(self, optimizer: Optimizer, index: int) -> None:
        key, value = (id(optimizer), index), float(optimizer.param_groups[index]["weight_decay"])
        if key not in self._numbers:
            self._numbers[key] = torch.empty((), dtype=torch.float64, device=self._device)
        elif self._written[key] == value:
            return
        self._numbers[key].fill_(value or _NONE)
        self._written[key] = value

    def _is_done_here(self, optimizer: Optimizer, index: int, group: dict[str, Any]) -> bool:
        number = group.get("weight_decay")
        if not group.get("decoupled_weight_decay") or isinstance(number, Tensor):
            return False
        if not isinstance(group.get("lr"), Tensor):
            return False
        is_scheduled = (id(optimizer), index) in self._scheduled
        types = {parameter.dtype for parameter in group["params"]}
        if group.get("fused"):
            return is_scheduled and len(types) == 1 and self._formula_of(group) is not None
        return not any(kind.is_complex for kind in types) and (is_scheduled or number != 0)

    def _formula_of(self, group: dict[str, Any]) -> Formula | None:
        """How the fused kernel decays weights of the type of the group, if it is known."""
        kind = next((parameter.dtype for parameter in group["params"]), None)
        if kind not in _FUSED:
            return None
        if kind not in self._formulas:
            self._formulas[kind] = formula_of_kernel(kind, self._device)
        return self._formulas[kind]


def _decay(optimizer: Optimizer, group: dict[str, Any], number: Tensor, formula: Formula | None) -> None:
    """Do what the step of a group would do first.

    Args:
        optimizer: for what a gradient scaler has told it.
        group: with its learning rate in a tensor.
        number: its weight decay.
        formula: of the fused kernel; else what torch does with a learning rate in a tensor.
    """
    rate, parameters = group["lr"].reshape(()), [each for each in group["params"] if each.grad is not None]
    if not parameters:
        return
    with torch.no_grad():
        if formula is None:
            torch._foreach_mul_(parameters, 1 - rate * number.to(rate.dtype))
            return
        overflow = getattr(optimizer, "found_inf", None)
        if isinstance(overflow, Tensor):  # Of a gradient scaler: the kernel leaves the weights as they are then.
            number = torch.where(overflow.reshape(()) == 1, _NONE, number)
        formula(parameters, rate, number)


_FUSED: Final = frozenset({torch.float32, torch.float64})
_DECOUPLED: Final = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
_NONE: Final = -0.0
"""As a product it changes no weight at all; 0.0 would take the sign of a weight that is -0.0."""
