"""Optimizers that step inside of a captured function: numbers on the device, state at fixed addresses."""

from __future__ import annotations

import copy
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from graphstep.errors import CaptureError
from graphstep.strategies.decays_inside import DecaysInside


class OptimizersInside:
    """The optimizers of one captured step.

    Their learning rates live on the device while the step runs, as fp32, so that a graph follows a schedule: whatever
    ``param_groups[i]["lr"]`` is before a replay is what the replay uses. So does weight decay where
    :class:`DecaysInside` can do it. All other numbers are part of the graph; when one has changed, :meth:`refresh`
    names it, and the graph has to be captured anew. Outside of the step, the groups hold what the user has put there.

    Args:
        optimizers: none of them may be used by two of these at once.
        device: where the step runs.
    """

    def __init__(self, optimizers: Iterable[Optimizer], device: torch.device) -> None:
        self._optimizers = tuple(optimizers)
        self._device = device
        self._rates: dict[tuple[int, int], Tensor] = {}
        self._written: dict[tuple[int, int], float] = {}
        self._numbers: list[dict[str, Any]] = []
        self._members: list[Any] = []
        self._states: list[dict[Any, Any]] = []
        self._held: list[Any] = []
        self._ways: list[Any] = []
        self._left: list[Tensor | None] = []
        """Gradients of frozen parameters, held so that no other tensor gets their ``id``."""
        self._scheduled: list[dict[str, Any]] = []
        """Groups whose rate a run has set."""
        self._decays = DecaysInside(self._optimizers, device)

    def __len__(self) -> int:
        return len(self._optimizers)

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self._optimizers)

    def parameters(self) -> Iterator[Tensor]:
        """The parameters of all groups."""
        for group in self._groups():
            yield from group["params"]

    def require_capturable(self, where: str) -> None:
        """Refuse optimizers whose step a graph cannot repeat.

        Raises:
            CaptureError: names them all, and why.
        """
        problems = [problem for optimizer in self._optimizers for problem in _problems_of(optimizer, self._device)]
        if problems:
            raise CaptureError("; ".join(problems), where=where, fix=_FIX)
        self._refuse_schedulers(where)

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the learning rates and weight decays on the device for the body.

        A rate that the body sets, as a scheduler does, stays set, and :meth:`require_capturable` refuses from then on.
        """
        put = self._put_rates()
        try:
            with self._decays.on_device():
                yield
        finally:
            for group, number, rate, version in put:
                now = group["lr"]
                # A scheduler writes into a rate that is a tensor; nothing else does.
                is_set = now is not rate or rate._version != version
                if is_set:
                    self._scheduled.append(group)
                if now is rate:
                    group["lr"] = float(rate) if is_set else number

    @contextmanager
    def captured(self, where: str) -> Iterator[None]:
        """The same for the body of a capture, in which optimizers that are not of these are refused."""
        flags = [(group, group["capturable"]) for group in self._groups() if "capturable" in group]
        known = {id(optimizer) for optimizer in self._optimizers}
        for group, _ in flags:
            group["capturable"] = True
        try:
            with self.on_device(), others_refused(known, where):
                before = [_fixed_in(optimizer) for optimizer in self._optimizers]
                yield
                self._refuse_changes(before, where)
            self._refuse_schedulers(where)
        finally:
            for group, flag in flags:
                group["capturable"] = flag

    def noted(self) -> OptimizersInside:
        """Note, just after a capture, what its replays depend on. Each graph has a note of its own."""
        made = copy.copy(self)  # The rates on the device are shared.
        made._decays = self._decays.noted()
        made._numbers = [_numbers_of(group) for group in self._groups()]
        made._members, made._ways = self._all_members(), self._all_ways()
        made._left = [parameter.grad for parameter in self.parameters() if not parameter.requires_grad]
        made._states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        made._held = list(chain.from_iterable(map(dict.values, made._states)))
        return made

    def moved(self) -> list[str]:
        """Before a replay: names what the graph would miss, if anything. Costs about 0.1 microseconds a tensor."""
        members = self._all_members()
        if len(members) != len(self._members) or not all(map(is_, members, self._members)):
            return ["the parameters of an optimizer"]
        if self._all_ways() != self._ways:
            return ["hooks, step or frozen parameters of an optimizer"]
        held = list(chain.from_iterable(map(dict.values, self._states)))
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        if len(states) != len(self._states) or not all(map(is_, states, self._states)):
            return ["the state of an optimizer"]
        if len(held) != len(self._held) or not all(map(is_, held, self._held)):
            return ["the state of an optimizer"]
        return []

    def refresh(self) -> list[str]:
        """Before a replay: write numbers that the graph follows to the device; names others that have changed."""
        now = [_numbers_of(group) for group in self._groups()]
        if now == self._numbers:
            self._write_rates()
            self._decays.write()
            return []
        changed = set()
        places = [(optimizer, index) for optimizer in self._optimizers for index in range(len(optimizer.param_groups))]
        for (optimizer, index), before, after in zip(places, self._numbers, now, strict=True):
            names = {str(key) for key in {*before, *after} if before.get(key) != after.get(key)}
            if _DECAY in names and self._decays.follows(optimizer, index):
                names.remove(_DECAY)
            elif _DECAY in names:
                self._decays.has_changed(optimizer, index)
            changed |= names
        if not changed:
            self._write_rates()
            self._decays.write()
        return sorted(changed)

    def _refuse_schedulers(self, where: str) -> None:
        if self._scheduled:
            number = len({id(group) for group in self._scheduled})
            raise CaptureError(
                f"the step sets the learning rate of {number} parameter groups; a replay runs no Python",
                where=where,
                fix="call scheduler.step() after the captured step, and not in it",
            )

    def _refuse_changes(self, before: list[dict[str, Any]], where: str) -> None:
        """Refuse what a step has put in place of what was there; a replay would go on from what the capture has read.

        Args:
            before: what was fixed in each optimizer.
            where: for errors.

        Raises:
            CaptureError: names it.
        """
        found = []
        for optimizer, was in zip(self._optimizers, before, strict=True):
            now = _fixed_in(optimizer)
            other = [name for name in dict.fromkeys([*was, *now]) if not _is_equal(was.get(name), now.get(name))]
            found += [f"{type(optimizer).__name__}.{name}" for name in other]
        if found:
            more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
            raise CaptureError(
                f"each step replaces {', '.join(found[:_MOST_NAMED])}{more}; a replay runs no Python, and would go on "
                "from what was there in the capture",
                where=where,
                fix="keep tensors there and write into them (add_, copy_), or step after the captured function",
            )

    def _groups(self) -> Iterator[dict[str, Any]]:
        for optimizer in self._optimizers:
            yield from optimizer.param_groups

    def _all_members(self) -> list[Any]:
        return [parameter for group in self._groups() for parameter in (group["params"], *group["params"])]

    def _all_ways(self) -> list[Any]:
        """How the optimizers step, and which parameters take part, to be compared."""
        found: list[Any] = []
        for optimizer in self._optimizers:
            hooks = (*optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks)
            found += [id(optimizer.__dict__.get("step")), hooks]
        for parameter in self.parameters():
            # What is left in .grad of a frozen one is used as it is, and nothing else watches it.
            left = None if parameter.requires_grad else parameter.grad
            found += [parameter.requires_grad, tuple(parameter._backward_hooks or ()), id(left)]
        return found

    def _keyed(self) -> Iterator[tuple[tuple[int, int], dict[str, Any]]]:
        for optimizer in self._optimizers:
            for index, group in enumerate(optimizer.param_groups):
                is_to_move = "lr" in group and not _is_on(group["lr"], self._device)
                if is_to_move and _takes_rate_on_device(group):
                    yield (id(optimizer), index), group

    def _put_rates(self) -> list[tuple[dict[str, Any], Any, Tensor, int]]:
        """Put tensors in place of the rates. Returns each group, its number, the tensor, and the tensor's version."""
        self._write_rates()
        found = [(group, group["lr"], self._rates[key], self._rates[key]._version) for key, group in self._keyed()]
        for group, _, rate, _ in found:
            group["lr"] = rate
        return found

    def _write_rates(self) -> None:
        for key, group in self._keyed():
            value = float(group["lr"])
            if key not in self._rates:
                self._rates[key] = torch.empty((), dtype=torch.float32, device=self._device)
            elif self._written[key] == value:
                continue
            self._rates[key].fill_(value)
            self._written[key] = value


def _is_on(value: Any, device: torch.device) -> bool:
    """True for a rate that is where it should be: the user's own tensor, which a graph reads as it is."""
    return isinstance(value, Tensor) and value.device == device and device.type != "cpu"


def _takes_rate_on_device(group: dict[str, Any]) -> bool:
    """False for the optimizers of torch that would read it back; of others it is only known when they are captured."""
    return bool(group.get("fused") or group.get("capturable") or not ("fused" in group or "capturable" in group))


def _numbers_of(group: dict[str, Any]) -> dict[str, Any]:
    """Everything in a group that a graph has fixed. A tensor counts as itself: it may change in place."""
    return {
        key: id(value) if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key not in _NOT_FIXED and (key != "lr" or isinstance(value, Tensor))
    }


def _fixed_in(optimizer: Optimizer) -> dict[str, Any]:
    """What a step may write into and not replace, by where it is: entries of groups, and of the state."""
    found: dict[str, Any] = {}
    for index, group in enumerate(optimizer.param_groups):
        names = group.keys() - _NOT_FIXED - {"lr"}
        found.update((f"param_groups[{index}][{name!r}]", group[name]) for name in sorted(names, key=str))
    for index, state in enumerate(optimizer.state.values()):
        entries = state.items() if isinstance(state, dict) else [("", state)]
        found.update((f"state[{index}][{name!r}]", value) for name, value in entries)
    return found


def _is_equal(mine: Any, theirs: Any) -> bool:
    """By identity, and plain values also by equality."""
    is_plain = isinstance(mine, bool | int | float | str | tuple) and type(mine) is type(theirs)
    return mine is theirs or (is_plain and bool(mine == theirs))


_DECAY = "weight_decay"
_MOST_NAMED = 5
_NOT_FIXED = frozenset({"params", "initial_lr", "capturable"})


def _problems_of(optimizer: Optimizer, device: torch.device) -> Iterator[str]:
    name = type(optimizer).__name__
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    if hooks:
        yield f"{name} has {len(hooks)} hooks on its step, which a replay would not call"
    if not all(map(_takes_rate_on_device, optimizer.param_groups)):
        yield f"{name} reads its learning rate, or its number of steps, on the host"
    if any(group.get("differentiable") for group in optimizer.param_groups):
        yield f"{name} is differentiable"
    on_host = sum(
        isinstance(value, Tensor) and value.device.type != device.type
        for state in optimizer.state.values()
        for value in (state.values() if isinstance(state, dict) else ())
    )
    if on_host:
        yield f"{name} has {on_host} tensors of state on another device than {device}"
    counted = {
        str(key)
        for state in optimizer.state.values()
        for key, value in (state.items() if isinstance(state, dict) else ())
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    if counted:
        yield f"{name} keeps {', '.join(sorted(counted))} as a number of the host"


_FIX = (
    "build it with fused=True or capturable=True, or step after the captured function: there the optimizer may be any"
)


@contextmanager
def others_refused(known: Collection[int], where: str) -> Iterator[None]:
    """Refuse the step of any other optimizer while the body runs, in this thread.

    torch has this hook for the whole process only: what other threads do meanwhile is let through.
    """
    inside = threading.get_ident()

    def refuse(optimizer: Optimizer, _arguments: Any, _named: Any) -> None:
        if threading.get_ident() != inside or id(optimizer) in known:
            return
        if all(isinstance(group.get("lr"), Tensor) for group in optimizer.param_groups):
            return
        raise CaptureError(
            f"{type(optimizer).__name__} steps inside the captured function; its learning rate would stay what it is "
            "now",
            where=where,
            fix="step after the captured function: the optimizer stays outside of the graph",
        )

    handle = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
