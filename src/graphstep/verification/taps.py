"""Copies of what flows into and out of modules, made by the step itself: inside of a graph by its replays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from graphstep.capture.tree import flatten, tensor_paths
from graphstep.verification.report import Part

Named = tuple[str, nn.Module]


class Side(Enum):
    """At which side of a module a tensor is seen, in the order of time."""

    ARGUMENT = auto()
    RESULT = auto()
    RESULT_GRADIENT = auto()
    ARGUMENT_GRADIENT = auto()

    @property
    def part(self) -> Part:
        """Whether that is in the forward or in the backward."""
        return Part.FORWARD if self in (Side.ARGUMENT, Side.RESULT) else Part.GRADIENT


class Place(NamedTuple):
    """What one tap sees. A module that is called with several layouts has a tap for each."""

    module: str
    side: Side
    tensor: str
    shape: tuple[int, ...]
    dtype: torch.dtype


class Event(NamedTuple):
    """One tensor that came by: where, and as which one there."""

    place: Place
    number: int


@dataclass(slots=True)
class _Tap:
    """What came by, one after the other; the number of the next one is on the device, so that a graph counts on."""

    history: Tensor
    counter: Tensor
    total: Tensor
    """How many came by: fewer than there is room for where the module was called less often."""


@dataclass(slots=True)
class Taps:
    """Taps at some modules. They are laid by :meth:`installed`, and what comes by is kept from :meth:`allocate` on.

    An eager run goes first: it shows how much comes by. What is captured while the taps are laid holds them too.
    """

    modules: Sequence[Named]
    keeps_tensors: bool = False
    """Modules get their arguments themselves and no aliases: for those that write into them. The gradient that is seen
    at an argument then has the parts of all who use the tensor."""
    events: list[Event] = field(default_factory=list)
    """What came by, in the order of time, as Python has seen it: complete for eager runs only."""
    _taps: dict[Place, _Tap] = field(default_factory=dict)
    _seen: dict[Place, int] = field(default_factory=dict)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Lay the taps for the body. The modules get hooks, which a graph that knows nothing of them does not allow."""
        handles: list[Any] = []
        try:
            for path, module in self.modules:
                before = partial(self._before, path, self.keeps_tensors or getattr(module, "inplace", False))
                handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                handles.append(module.register_forward_hook(partial(self._after, path)))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def allocate(self, device: torch.device) -> None:
        """Make room for as much as has come by so far."""
        for place, number in self._seen.items():
            history = torch.zeros((number, *place.shape), dtype=place.dtype, device=device)
            counter, total = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
            self._taps[place] = _Tap(history, counter, total)

    def restart(self) -> None:
        """Forget what came by."""
        self.events.clear()
        self._seen.clear()
        for tap in self._taps.values():
            tap.history.zero_()
            tap.counter.zero_()
            tap.total.zero_()

    def seen(self) -> Mapping[Place, Tensor]:
        """What came by at each place, on the host: [number, ...]."""
        numbers = {place: int(tap.total.item()) for place, tap in self._taps.items()}
        return {place: tap.history[: numbers[place]].to("cpu", copy=True) for place, tap in self._taps.items()}

    # ----- hooks

    def _before(self, path: str, keeps_tensors: bool, _module: nn.Module, args: Any, named: Any) -> Any:
        def see(name: str, tensor: Tensor) -> Tensor:
            self._note(path, Side.ARGUMENT, name, tensor)
            if not (tensor.requires_grad and torch.is_grad_enabled()):
                return tensor
            note = partial(self._note, path, Side.ARGUMENT_GRADIENT, name)
            if keeps_tensors:
                _hooked_first(tensor, note)
                return tensor
            # The gradient of the argument has parts of others who use the same tensor; this has the module's own.
            followed: Tensor = _Follow.apply(tensor, note, True)  # type: ignore[no-untyped-call]
            return followed

        return _replaced("argument", args, see), _replaced("argument", named, see)

    def _after(self, path: str, _module: nn.Module, _args: Any, result: Any) -> Any:
        seen = set()

        def see(name: str, tensor: Tensor) -> Tensor:
            if not (tensor.requires_grad and torch.is_grad_enabled()):
                return tensor
            seen.add(name)
            # Hooks on the result are those of its module, hooks on the alias those of who called it: this is between.
            note = partial(self._note, path, Side.RESULT_GRADIENT, name)
            followed: Tensor = _Follow.apply(tensor, note, False)  # type: ignore[no-untyped-call]
            return followed

        tensors, structure = flatten(result)
        names = tensor_paths(structure, "result")
        for name, tensor in zip(names, tensors, strict=True):
            self._note(path, Side.RESULT, name, tensor)
        replaced = _replaced("result", result, see)
        for name, tensor in zip(names, tensors, strict=True):
            if name not in seen and tensor.requires_grad and torch.is_grad_enabled():
                _hooked_first(tensor, partial(self._note, path, Side.RESULT_GRADIENT, name))
        return replaced

    def _note(self, path: str, side: Side, name: str, tensor: Tensor) -> None:
        place = Place(path, side, name, tuple(tensor.shape), tensor.dtype)
        number = self._seen[place] = self._seen.get(place, 0) + 1
        self.events.append(Event(place, number - 1))
        tap = self._taps.get(place)
        if tap is not None:
            with torch.no_grad():
                tap.history.index_copy_(0, tap.counter, tensor.detach().unsqueeze(0))
                tap.counter.add_(1).remainder_(tap.history.shape[0])
                tap.total.add_(1)


class _Follow(torch.autograd.Function):
    """The same tensor; its gradient is shown to a function on its way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, see: Callable[[Tensor], None], is_view: bool) -> Tensor:
        """An alias. Autograd refuses writes into a view of this kind, and takes other aliases for new tensors."""
        ctx.see = see
        return tensor.view_as(tensor) if is_view else tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradient as it is."""
        ctx.see(gradients[0])
        return gradients[0], None, None


def _hooked_first(tensor: Tensor, see: Callable[[Tensor], None]) -> None:
    """Show the gradient of a tensor before other hooks on it may change it."""
    handle = tensor.register_hook(see)
    hooks = tensor._backward_hooks
    if hooks is not None:  # Autograd goes by the order in which entries were made.
        later = {key: hooks.pop(key) for key in list(hooks) if key != handle.id}
        hooks.update(later)


def _replaced(name: str, value: Any, see: Callable[[str, Tensor], Tensor]) -> Any:
    """Show the tensors of plain containers, and put in their place what is returned; other objects stay themselves."""
    if isinstance(value, Tensor):
        return see(name, value)
    if type(value) in (list, tuple):
        return type(value)(_replaced(f"{name}[{number}]", each, see) for number, each in enumerate(value))
    if type(value) is dict:
        return {key: _replaced(f"{name}[{key!r}]", each, see) for key, each in value.items()}
    return value


def children_of(path: str, module: nn.Module, untapped: Collection[nn.Module] = ()) -> list[Named]:
    """The modules that a module calls: its children, and in place of a list of modules those in it.

    So it is with those in ``untapped``, which must not have hooks.
    """
    found: list[Named] = []
    for name, child in module.named_children():
        inner = f"{path}.{name}" if path else name
        is_list = getattr(type(child), "forward", None) is nn.Module.forward or isinstance(child, nn.ModuleList)
        if is_list or child in untapped:
            found += children_of(inner, child, untapped)
        else:
            found.append((inner, child))
    return found


def distinct(modules: Iterable[Named]) -> list[Named]:
    """Each module once: one that lies in two places has one name here."""
    return list({id(module): (path, module) for path, module in reversed(list(modules))}.values())[::-1]
