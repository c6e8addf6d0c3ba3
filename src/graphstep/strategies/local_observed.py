"""Calls that run eagerly under observation: their order, and which of them follow each other."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from graphstep.capture.chain import Handover, Place
from graphstep.capture.plan import Key, PlanObserver
from graphstep.capture.region import Region
from graphstep.capture.signature import Signature
from graphstep.capture.tree import values_of
from graphstep.engine import torch_private
from graphstep.strategies.outside_gradients import note_outside


class Caller(Protocol):
    """Who calls a region."""

    region: Region


class ObservedCalls:
    """Watches calls for an observer, and notes how the results of one become the arguments of the next."""

    def __init__(self) -> None:
        self._last: WatchedCall | None = None
        self._seen: set[Key] = set()
        self.handovers: dict[Key, Handover] = {}
        """For what follows another call: which arguments are which results of it."""
        self.without_gradient: set[Region] = set()
        """Regions that were called in training and whose results need no gradient."""

    def forget(self) -> None:
        """Begin anew."""
        self._last = None
        self._seen.clear()
        self.handovers.clear()
        self.without_gradient.clear()

    def begin(
        self,
        observer: PlanObserver,
        caller: Caller,
        signature: Signature,
        tensors: Sequence[Tensor],
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        taken: Iterable[int],
    ) -> tuple[WatchedCall, tuple[Any, ...], dict[str, Any]]:
        """A call begins. Returns it with the arguments to run it with."""
        key = observer.forward(caller.region, signature, tensors, taken=taken)
        observer.plan.calls[key].refusal = _refusal(tensors, signature)
        call = WatchedCall(observer, key, arguments, named, self.without_gradient)
        before, self._last = self._last, call
        is_first = key not in self._seen
        self._seen.add(key)
        if is_first and before is not None and before.observer is observer:
            handover = before.handover_to(call, arguments, named)
            if handover:
                arguments, named = _SoleUse(before.key, call, handover, self.handovers).aliased(arguments, named)
        return call, arguments, named


class WatchedCall:
    """One observed forward, to be compared with the next one. Keeps no result and no argument with a history alive."""

    def __init__(
        self,
        observer: PlanObserver,
        key: Key,
        arguments: tuple[Any, ...],
        named: dict[str, Any],
        without_gradient: set[Region],
    ) -> None:
        self.observer = observer
        self.key = key
        self._without_gradient = without_gradient
        self._num_arguments, self._names = len(arguments), named.keys()
        self._given = {place: _noted(value) for place, value in _places(arguments, named)}
        self._outputs: list[tuple[weakref.ref[Tensor], tuple[Any, ...]]] = []
        self._closing: _Closing | None = _Closing(observer, key)

    def returned(self, outputs: Sequence[Tensor], begins_at: Sequence[Any]) -> None:
        """The region has run.

        Args:
            outputs: its results, flat.
            begins_at: nodes of autograd that have made its arguments; ``None`` for a leaf.
        """
        closing, self._closing = self._closing, None
        self.observer.outputs(*self.key, outputs)
        if not any(tensor.requires_grad for tensor in outputs):
            self._without_gradient.add(self.key[0].region)
        # A parameter that is returned is the user's, and no place for hooks.
        differentiable = [tensor for tensor in outputs if tensor.requires_grad and not tensor.is_leaf]
        call = self.observer.plan.calls[self.key]
        if call.used is None and len(differentiable) > 1:
            call.used = note_outside(outputs, begins_at)
        if differentiable and closing is not None:
            torch.autograd.graph.register_multi_grad_hook(differentiable, closing.backward_begins, mode="any")
        self._outputs = [(weakref.ref(tensor), _state(tensor)) for tensor in outputs]

    def handover_to(self, following: WatchedCall, arguments: tuple[Any, ...], named: dict[str, Any]) -> Handover:
        """Which arguments of the next call are results of this one, if all else is as this one had it; else empty."""
        if self._num_arguments != len(arguments) or self._names != named.keys() or self.key[1] != following.key[1]:
            return ()
        places: list[tuple[Place, int]] = []
        for place, value in _places(arguments, named):
            output = self._output(value)
            if output is not None:
                places.append((place, output))
            elif not _stays(value) or not _is_noted(self._given[place], value):
                return ()
        handed = [output for _, output in places]
        results = [ref() for ref, _ in self._outputs]
        wanted = [index for index, result in enumerate(results) if result is None or result.requires_grad]
        is_complete = len(set(handed)) == len(handed) and set(wanted) <= set(handed)
        return tuple(places) if places and is_complete else ()

    def _output(self, value: Any) -> int | None:
        for index, (ref, state) in enumerate(self._outputs):
            if isinstance(value, Tensor) and ref() is value:
                return index if _state(value) == state else None
        return None


class _SoleUse:
    """Finds out in the backward whether results are used by one call alone, which gets aliases of them.

    If the gradient of a result is the very tensor that came for its alias, nothing was added to it on the way. A result
    that somebody still holds by then may get a hook or another use: it does not count as such.
    """

    def __init__(self, before: Key, call: WatchedCall, handover: Handover, found: dict[Key, Handover]) -> None:
        self._before, self._key, self._handover, self._found = before, call.key, handover, found
        self._plan = call.observer.plan
        self._num_waiting = 0

    def aliased(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with aliases of the results among them."""
        positional, by_name = list(arguments), dict(named)
        for place, _ in self._handover:
            if isinstance(place, int):
                positional[place] = self._alias_of(positional[place])
            else:
                by_name[place] = self._alias_of(by_name[place])
        return tuple(positional), by_name

    def _alias_of(self, tensor: Tensor) -> Tensor:
        if not tensor.requires_grad:
            return tensor
        self._num_waiting += 1
        addresses: list[int] = []
        # Not a view: that would keep the result alive.
        alias: Tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape)
        alias.register_hook(lambda gradient: addresses.append(gradient.data_ptr()))
        this = weakref.ref(tensor)
        tensor.register_hook(lambda gradient: self._arrived(addresses == [gradient.data_ptr()] and this() is None))
        return alias

    def _arrived(self, is_sole: bool) -> None:
        self._num_waiting -= int(is_sole)
        call = self._plan.calls.get(self._key)
        if self._num_waiting == 0 and is_sole and call is not None:
            call.follows = self._before
            self._found[self._key] = self._handover


class _Closing:
    """Kept by autograd until the backward begins, or by nobody."""

    def __init__(self, observer: PlanObserver, key: Key) -> None:
        self._observer, self._key = observer, key
        self._is_open = True

    def backward_begins(self, _gradient: Tensor) -> None:
        if self._is_open:
            self._is_open = False
            self._observer.backward(*self._key, torch_private.backward_pass())

    def __del__(self) -> None:
        if self._is_open:
            self._observer.dropped(*self._key)


def _refusal(tensors: Sequence[Tensor], signature: Signature) -> str:
    kinds = {type(tensor).__name__ for tensor in tensors if is_subclassed(tensor)}
    kinds |= {type(value).__name__ for value in values_of(signature.structure) if isinstance(value, nn.Module)}
    return f"an argument of type {', '.join(sorted(kinds))}" if kinds else ""


def is_subclassed(tensor: Tensor) -> bool:
    """True for a tensor with a class of its own, which may compute what it likes."""
    return type(tensor) is not Tensor and type(tensor) is not nn.Parameter


def _places(arguments: tuple[Any, ...], named: dict[str, Any]) -> Iterator[tuple[Place, Any]]:
    yield from enumerate(arguments)
    yield from named.items()


def _noted(value: Any) -> Any:
    """A value, or a reference to it that does not keep it alive."""
    if isinstance(value, Tensor):
        return weakref.ref(value)
    return value if _stays(value) else None


def _is_noted(noted: Any, value: Any) -> bool:
    return (noted() if isinstance(noted, weakref.ref) else noted) is value


def _state(tensor: Tensor) -> tuple[Any, ...]:
    """Changes when somebody writes into a tensor or wants to see its gradient."""
    version = None if tensor.is_inference() else tensor._version
    return version, len(tensor._backward_hooks or ()), tensor.retains_grad


def _stays(value: Any) -> bool:
    """True for what cannot change while its identity stays, or whose changes show."""
    if isinstance(value, tuple):
        return all(map(_stays, value))
    if isinstance(value, Tensor):
        return not value.requires_grad
    return value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device))
