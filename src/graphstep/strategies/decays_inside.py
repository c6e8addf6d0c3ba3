"""Weight decay of optimizers in a captured step, from numbers on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphstep.strategies.added_decay import type_of_number, with_decay
from graphstep.strategies.fused_decay import Formula, formula_of_kernel

Key = tuple[int, int]
"""An optimizer, by identity, and the position of a group in it."""


class DecaysInside:
    """Lets a graph follow the weight decay of torch's optimizers, which take it as a number of the host.

    It is done just before the step, which is told that there is none. AdamW and its relatives decay the weights before
    they do anything else to them. Where their step is made of single operations, it is always done here. The fused
    kernel decays by itself at no cost, so there it is done only once the number has been seen to change; and only for
    float32 and float64, as the kernel does not round half-precision weights between decay and update. How it rounds
    differs between devices and versions of torch: :func:`formula_of_kernel` finds out.

    All others add the decay to the gradients. Once it has been seen to change, they step with other gradients, to which
    it has been added, and ``.grad`` is what it was after the step. :func:`type_of_number` finds out how it is rounded.
    A decay of 0 is a graph of its own: its product with a weight would change a gradient of -0.0, and is NaN where the
    weight is infinite, while an optimizer without decay leaves gradients as they are.

    Args:
        optimizers: those of the step.
        device: where the step runs.
    """

    def __init__(self, optimizers: Iterable[Optimizer], device: torch.device) -> None:
        self._optimizers = [optimizer for optimizer in optimizers if type(optimizer) in _FOLLOWED]
        self._device = device
        self._numbers: dict[Key, Tensor] = {}
        self._written: dict[Key, float] = {}
        self._seen: dict[Key, Any] = {}
        """The number in the latest body of :meth:`on_device`."""
        self._scheduled: set[Key] = set()
        """Groups whose number has changed from one body to the next, or after a capture."""
        self._formulas: dict[torch.dtype, Formula | None] = {}
        self._types_of_numbers: dict[tuple[Any, ...], torch.dtype | None] = {}
        self._done: dict[Key, tuple[Optimizer, int]] = {}
        """Groups whose decay was done here in the latest body of :meth:`on_device`."""

    def noted(self) -> DecaysInside:
        """Just after a capture: the same, knowing what its graph follows."""
        made = copy.copy(self)
        made._done = dict(self._done)
        return made

    def follows(self, optimizer: Optimizer, index: int) -> bool:
        """Whether the captured step reads the weight decay of a group from the device."""
        if (id(optimizer), index) not in self._done:
            return False
        group = optimizer.param_groups[index]
        return bool(group.get("decoupled_weight_decay") or group["weight_decay"])

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
        aside: list[Callable[[], None]] = []

        def give_back(*_arguments: Any) -> None:
            while aside:
                aside.pop()()

        def decay(optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            if any(value is not None for value in (*arguments[1:], *named.values())):
                return  # A closure computes gradients first, with weights that have not decayed.
            for index, group in enumerate(optimizer.param_groups):
                key, number = (id(optimizer), index), group.get("weight_decay")
                # What was written was found out before, outside of a capture: kernels cannot be tried in one.
                if self._written.get(key) != number or not self._is_done_here(optimizer, index, group):
                    continue
                if group.get("decoupled_weight_decay"):
                    formula = self._formula_of(group) if group.get("fused") else None
                    _decay(optimizer, group, self._numbers[key], formula)
                elif _is_to_be_added_to(optimizer, group):
                    aside.extend(_add(group, self._numbers[key], self._types_of(optimizer, group)))
                else:
                    continue
                self._done[key] = optimizer, index
                aside.append(partial(group.__setitem__, "weight_decay", group["weight_decay"]))
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
        if isinstance(number, Tensor) or not isinstance(group.get("lr"), Tensor):
            return False
        is_scheduled = (id(optimizer), index) in self._scheduled
        if not group.get("decoupled_weight_decay"):
            return is_scheduled and bool(number) and None not in self._types_of(optimizer, group).values()
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

    def _types_of(self, optimizer: Optimizer, group: dict[str, Any]) -> dict[torch.dtype, torch.dtype | None]:
        """In which type the decay is to be added to gradients of each type of a group, if it is known."""
        name, found = type(optimizer).__name__, {}
        for kind in dict.fromkeys(parameter.dtype for parameter in group["params"]):
            key = (name, group.get("fused"), group.get("foreach"), kind)
            if key not in self._types_of_numbers:
                is_tried = kind.is_floating_point
                self._types_of_numbers[key] = type_of_number(name, group, kind, self._device) if is_tried else None
            found[kind] = self._types_of_numbers[key]
        return found


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


def _is_to_be_added_to(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """False where the step does more to the gradients before the decay, or they are not plain tensors."""
    if isinstance(getattr(optimizer, "grad_scale", None), Tensor):
        return False  # The kernel unscales them first, also those that the user sees.
    return all(
        type(each) in _PLAIN
        and type(each.grad) in _PLAIN
        and each.grad.layout is torch.strided
        and each.grad.dtype == each.dtype
        for each in group["params"]
        if each.grad is not None
    )


def _add(
    group: dict[str, Any], number: Tensor, types: Mapping[torch.dtype, torch.dtype | None]
) -> Iterator[Callable[[], None]]:
    """Put gradients with the decay in place of those that are there. Returns what gives each of them back."""
    # The step negates what it is given first, if it maximizes.
    signed = (-number if group.get("maximize") else number).reshape(1)
    given = {kind: signed.to(types[kind]) for kind in types}
    for parameter in group["params"]:
        before = parameter.grad
        if before is None:
            continue
        with torch.no_grad():
            parameter.grad = with_decay(before, parameter, given[parameter.dtype])
        yield partial(setattr, parameter, "grad", before)


_FUSED: Final = frozenset({torch.float32, torch.float64})
_FOLLOWED: Final = (
    torch.optim.ASGD,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.SGD,
)
"""Their subclasses may step otherwise."""
_PLAIN: Final = (Tensor, nn.Parameter)
_NONE: Final = -0.0
"""As a product it changes no weight at all; 0.0 would take the sign of a weight that is -0.0."""
