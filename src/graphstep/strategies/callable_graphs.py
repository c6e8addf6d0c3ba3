"""Graphs of callables whose order was given by hand: replays that are checked strictly."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from graphstep.capture.attributes import Attributes
from graphstep.capture.chain import Chain
from graphstep.capture.chain_run import ChainRun
from graphstep.capture.manifest import Watched, verify
from graphstep.capture.pending import Pending
from graphstep.capture.reasons import EagerReason
from graphstep.capture.region import Region
from graphstep.capture.report import CaptureReport, RegionStats
from graphstep.capture.session import GraphSession
from graphstep.capture.signature import Signature, TensorLayout, ambient_key, repeated_in
from graphstep.capture.tree import flatten, tensor_paths
from graphstep.errors import InputMismatchError, LifecycleError, PlanError
from graphstep.strategies.local_calls import never_replayed
from graphstep.strategies.order_cursor import OrderCursor, Turn


@dataclass(slots=True, eq=False)
class Captured:
    """One callable, with what its graphs depend on."""

    region: Region
    stats: RegionStats
    watched: Watched
    roots: tuple[tuple[str, nn.Module], ...]
    """Name and module of those that it uses, without what lies inside of them."""
    names: Sequence[str]
    """Of its positional arguments."""
    module: nn.Module | None = None
    """What was given, if that is a module."""
    attributes: Attributes | None = None
    """What Python reads in it, as it was before the capture."""
    pending: Pending | None = None
    """Never one: each call begins a run of its own."""

    def note(self) -> None:
        """Before the capture: note what Python reads."""
        named = {id(m): (path, m) for prefix, root in self.roots for path, m in root.named_modules(prefix=prefix)}
        # Hooks of the module itself run around it.
        self.attributes = Attributes(named.values(), hooks_of=list(named.values())[1:])

    def settle(self) -> None:
        """After the capture: leave out what the callable sets itself."""
        if self.attributes is not None:
            self.attributes.ignore_changed()

    @property
    def training(self) -> tuple[bool, ...]:
        """The training flags of its modules now."""
        return tuple(module.training for module in self.region.modules)


@dataclass(slots=True, eq=False)
class Place:
    """One callable for one microbatch."""

    captured: Captured
    signature: Signature
    forward: Turn
    backward: Turn
    chain: Chain | None = None
    keywords: Mapping[str, int] = field(default_factory=dict)
    """Names of keyword arguments, each with its place in the sample."""
    guard: Callable[..., bool] | None = None
    """True for tensors with the layouts of the signature; ``None`` where that cannot be told fast."""


class CallableGraphs:
    """The owner of graphs that were made together.

    Args:
        session: owner of the recordings; closed with this object.
    """

    def __init__(self, session: GraphSession) -> None:
        self.session = session
        self.cursor: OrderCursor | None = None
        """The order of a step; ``None`` if any order will do that keeps what is in flight."""
        self._num_open = 0
        """Forwards whose backward may still come."""
        self._on_close: list[Callable[[], None]] = []

    def on_close(self, action: Callable[[], None]) -> None:
        """Do this when the graphs go."""
        self._on_close.append(action)

    def close(self) -> None:
        """Free all graphs. Results that are held stay valid. May be called twice."""
        while self._on_close:
            self._on_close.pop()()
        self.session.close()

    def is_idle(self) -> bool:
        """True if nothing is in flight."""
        return self._num_open == 0

    def report(self) -> CaptureReport:
        """What has been captured, and how it was used."""
        return self.session.report()

    def call(self, place: Place, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run a callable for a microbatch: a replay, or eagerly where its graphs are for something else.

        Raises:
            InputMismatchError: names every argument that is not as in the sample.
            PlanError: it is not its turn.
            StaleAddressError: a weight or buffer has moved since the capture.
            LifecycleError: the graphs are closed.
        """
        captured, signature = place.captured, place.signature
        if len(named) > 1:
            wanted = place.keywords  # Their order does not matter.
            named = {name: named[name] for name in sorted(named, key=lambda n: (wanted.get(n, len(wanted)), n))}
        if self.session.is_closed:
            raise LifecycleError(
                "its graphs were reset", where=captured.region.name, fix="make graphed callables again"
            )
        tensors = self._checked(place, arguments, named)
        reason = None if tensors is None else self._why_eager(place, tensors)
        if tensors is None or reason is not None:
            return self._eager(place, reason or EagerReason.EVALUATION, arguments, named)
        chain = place.chain
        if chain is None:
            raise LifecycleError("nothing is captured yet", where=captured.region.name, fix="capture first")
        verify(captured.watched, "before a replay")
        pair = chain.pairs[0]
        if self.cursor is not None:
            self.cursor.check(place.forward)
        if pair.num_in_flight or not chain.lane.allows(pair.forward_position):
            raise PlanError(
                f"{place.forward} came while a microbatch in flight needs its memory",
                where=captured.region.name,
                fix="run the backward first, or let go of the result of a forward that will have none; for several "
                "microbatches in flight give their order (_order)",
            )
        if chain.lane.holds_results(pair.forward_position):
            chain.lane.copy_held_results()
            return self._eager(place, EagerReason.RESULT_HELD, arguments, named)
        self._takes_turn(place)
        run = ChainRun(chain, 0, self._closed, lambda _last: self._backward(place))
        return run.start(tensors, arguments, named, signature.ambient.key)

    # ----- which way

    def _checked(self, place: Place, arguments: tuple[Any, ...], named: dict[str, Any]) -> Sequence[Tensor] | None:
        """The argument tensors, flat; ``None`` for a call in modes that the graph is not for."""
        signature, captured = place.signature, place.captured
        if not torch.is_grad_enabled() or captured.training != signature.training:
            return None
        ambient = ambient_key(self.session.device.type)
        if (
            place.guard is not None
            and not named
            and ambient == signature.ambient.key
            and all(type(argument) is Tensor for argument in arguments)
            and len(arguments) == len(signature.layouts)
            and place.guard(*arguments)
        ):
            return arguments
        tensors, _ = flatten((arguments, named))
        given = Signature.of((arguments, named), device_type=self.session.device.type, modules=captured.region.modules)
        differences = _differences(signature, given, captured.names)
        if differences:
            raise InputMismatchError(
                "; ".join(differences),
                where=captured.region.name,
                fix="call it as in sample_args and sample_kwargs, or make other graphs for other arguments",
            )
        return tensors

    def _why_eager(self, place: Place, tensors: Sequence[Tensor]) -> EagerReason | None:
        never = never_replayed()
        if never is not None:
            return never
        if len(tensors) > 1 and repeated_in(tensors) != place.signature.repeated:
            return EagerReason.OTHER_SIGNATURE  # One tensor for several arguments, or no longer.
        attributes = place.captured.attributes
        changed = attributes.changed() if attributes is not None else ()
        if changed:
            place.captured.stats.last_detail = changed[0]
            return EagerReason.CHANGED_ATTRIBUTE
        if place.chain is not None and place.chain.pairs[0].has_new_hook():
            return EagerReason.NEW_HOOK
        return None

    def _eager(self, place: Place, reason: EagerReason, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        captured = place.captured
        captured.stats.eager_calls[reason] += 1
        has_turn = self.cursor is not None and reason in _IN_TURN
        if has_turn:
            self._takes_turn(place)
        result = captured.region.function(*arguments, **named)
        if has_turn:
            wanted = [tensor for tensor in flatten(result)[0] if tensor.requires_grad]
            closing = _Closing(self, place)
            if wanted:
                torch.autograd.graph.register_multi_grad_hook(wanted, closing.backward_begins, mode="any")
        return result

    # ----- the order

    def _takes_turn(self, place: Place) -> None:
        if self.cursor is not None:
            self.cursor.take(place.forward)
        self._num_open += 1

    def _backward(self, place: Place) -> None:
        if self.cursor is not None:
            self.cursor.take(place.backward)

    def _closed(self) -> None:
        self._num_open -= 1


_IN_TURN: Final = frozenset(
    {
        EagerReason.RESULT_HELD,
        EagerReason.CHANGED_ATTRIBUTE,
        EagerReason.NEW_HOOK,
        EagerReason.OTHER_SIGNATURE,
    }
)
"""Reasons for which a training call of the step runs eagerly in its turn."""


class _Closing:
    """Kept by autograd until the backward of an eager call begins, or by nobody."""

    def __init__(self, graphs: CallableGraphs, place: Place) -> None:
        self._graphs, self._place = graphs, place

    def backward_begins(self, _gradient: Tensor) -> None:
        """Its turn."""
        self._graphs._backward(self._place)

    def __del__(self) -> None:
        self._graphs._closed()


class GraphedCallable:
    """A callable for one microbatch, as graphs. Same arguments and results as the original.

    Results may be kept: no replay overwrites one that somebody holds.
    """

    def __init__(self, graphs: CallableGraphs, place: Place, around: CurrentMicrobatch | None = None) -> None:
        self._graphs, self._place, self._around = graphs, place, around

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run it, with the hooks of the module around it. See :func:`graphstep.make_graphed_callables` for errors."""
        if self._around is None:
            return self._graphs.call(self._place, arguments, named)
        with self._around.entered(self._place) as module:
            return module(*arguments, **named)

    def report(self) -> CaptureReport:
        """What was captured with it, and how it was used."""
        return self._graphs.report()

    def reset(self) -> None:
        """Free its graphs and those of all callables that were given with it. May be called twice."""
        self._graphs.close()


class CurrentMicrobatch:
    """What stands in place of the ``forward`` of a module that is captured for several microbatches."""

    def __init__(self, graphs: CallableGraphs, module: nn.Module, function: Callable[..., Any]) -> None:
        self._graphs, self._module, self._function = graphs, module, function
        self._place: Place | None = None

    @contextmanager
    def entered(self, place: Place) -> Iterator[nn.Module]:
        """A call of the module in the body is for this microbatch."""
        before, self._place = self._place, place
        try:
            yield self._module
        finally:
            self._place = before

    def report(self) -> CaptureReport:
        """What was captured with it, and how it was used."""
        return self._graphs.report()

    def reset(self) -> None:
        """Free its graphs and those of all callables that were given with it. May be called twice."""
        self._graphs.close()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Replay the microbatch whose call is under way; a call of the module by itself runs as it is."""
        place = self._place
        if place is None:
            return self._function(*arguments, **named)
        return self._graphs.call(place, arguments, named)


def layout_guard(signature: Signature) -> Callable[..., bool] | None:
    """A fast check of plain positional tensors, if the sample had nothing else."""
    paths = tensor_paths(signature.structure)
    if paths != [f"[0][{index}]" for index in range(len(paths))]:
        return None
    layouts = signature.layouts

    def holds(*tensors: Tensor) -> bool:
        return all(TensorLayout.of(tensor) == layout for tensor, layout in zip(tensors, layouts, strict=True))

    return holds


def _differences(mine: Signature, given: Signature, names: Sequence[str]) -> list[str]:
    """In words, with the names of arguments. Strides do not matter: arguments are copied."""
    if mine == given:
        return []
    layouts = tuple(
        TensorLayout(theirs.shape, own.stride, theirs.dtype, theirs.device, theirs.requires_grad)
        if own.shape == theirs.shape
        else theirs
        for own, theirs in zip(mine.layouts, given.layouts, strict=False)
    )
    if len(layouts) == len(given.layouts):
        given = Signature(given.structure, layouts, given.ambient, given.training, mine.repeated)
    return [_with_name(text, names) for text in mine.differences(given, "")]


def names_of(function: Callable[..., Any]) -> Sequence[str]:
    """Of the positional arguments of a function, or of a module's forward."""
    try:
        parameters = inspect.signature(getattr(function, "forward", function)).parameters.values()
    except (TypeError, ValueError):
        return ()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _with_name(text: str, names: Sequence[str]) -> str:
    """``[0][1].mask changed shape`` as ``argument 'context'.mask changed shape``."""
    for index in range(text.count("[") + len(names)):
        start = f"[0][{index}]"
        if text.startswith(start):
            name = repr(names[index]) if index < len(names) else f"number {index + 1}"
            return f"argument {name}{text[len(start) :]}"
    if text.startswith("[1]['"):
        name, rest = text[len("[1]['") :].split("']", 1)
        return f"argument {name!r}{rest}"
    return text
