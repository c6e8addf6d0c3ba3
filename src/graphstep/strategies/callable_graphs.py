"""Graphs of callables whose order was given by hand: replays that are checked strictly."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from graphstep.capture.ambient import ambient_key
from graphstep.capture.attributes import Attributes
from graphstep.capture.chain import Chain
from graphstep.capture.chain_run import ChainRun
from graphstep.capture.eager_triple import EagerTriple
from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.graph_triple import GraphTriple
from graphstep.capture.manifest import Watched, verify
from graphstep.capture.pending import Pending
from graphstep.capture.plan import Phase
from graphstep.capture.reasons import EagerReason
from graphstep.capture.region import Region
from graphstep.capture.report import CaptureReport, RegionStats
from graphstep.capture.session import GraphSession
from graphstep.capture.signature import Signature, repeated_in
from graphstep.capture.tree import flatten
from graphstep.capture.triple_run import TripleRun, WaitingRun
from graphstep.errors import InputMismatchError, LifecycleError, PlanError
from graphstep.native.build import Build
from graphstep.native.interface import Facts, Pattern
from graphstep.strategies.callable_checks import named_differences, refuse_sparse
from graphstep.strategies.eager_forward import EagerForward
from graphstep.strategies.handed_copies import HandedCopies
from graphstep.strategies.local_calls import never_replayed
from graphstep.strategies.order_cursor import OrderCursor, Turn
from graphstep.strategies.relays import add_backward, callable_facts, pattern_of

_IN_TURN: Final = frozenset(
    {
        EagerReason.RESULT_HELD,
        EagerReason.CHANGED_ATTRIBUTE,
        EagerReason.NEW_HOOK,
        EagerReason.OTHER_SIGNATURE,
        EagerReason.PLACE_IN_USE,
    }
)
"""Reasons for which a training call of the step runs eagerly in its turn."""


@dataclass(slots=True, eq=False)
class CapturedCallable:
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

    def expect(self, pending: Pending) -> None:
        """Wait for this call."""
        self.pending = pending

    def expect_nothing(self) -> None:
        """End the run that waits for this call."""
        if self.pending is not None:
            self.pending.drop()

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
class ScheduledCallable:
    """One callable for one microbatch."""

    captured: CapturedCallable
    signature: Signature
    forward: Turn
    backward: Turn
    weight_gradients: Turn | None = None
    """``None`` if they are computed in the backward."""
    chain: Chain | None = None
    has_gradient: bool = True
    """False if none of its results needs a gradient: it has no graphs, and no turns."""
    is_read_in_place: bool = False
    """Another callable reads its results where they are."""
    keywords: Mapping[str, int] = field(default_factory=dict)
    """Names of keyword arguments, each with its place in the sample."""
    guard: Callable[..., bool] | None = None
    """True for tensors with the layouts of the signature; ``None`` where that cannot be told fast."""
    pattern: Pattern | None = None
    """The same for the compiled part, of arguments of any kind."""
    facts: Facts | None = None
    """All else that has to be as it was, for the compiled part."""


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
        """Forwards whose backward or weight gradients may still come."""
        self._waiting: dict[ScheduledCallable, WaitingRun] = {}
        """What has run backward, and waits for its weight gradients."""
        self._copies = HandedCopies()
        self._roots: Collection[tuple[str, nn.Module]] = ()
        self._on_close: list[Callable[[], None]] = []
        self._build: Build | None = None
        """Of the compiled part, while that is not there."""
        self._scheduled: Sequence[ScheduledCallable] = ()
        self.around: Callable[..., Any] | None = None
        """Runs :meth:`_call` for every call, where fp8 arguments ask for something."""

    def on_close(self, action: Callable[[], None]) -> None:
        """Do this when the graphs go."""
        self._on_close.append(action)

    def close(self) -> None:
        """Free all graphs. Results that are held stay valid. May be called twice."""
        while self._on_close:
            self._on_close.pop()()
        self._give_up_waiting()
        self.session.close()

    @contextmanager
    def eagerly(self) -> Iterator[None]:
        """In the body callables run as they are, in any order, and nothing is counted. Nothing may be in flight."""
        before = self.around

        def run(scheduled: ScheduledCallable, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
            return scheduled.captured.region.function(*arguments, **named)

        def instead(_call: object, *what: Any) -> Any:
            return run(*what) if before is None else before(run, *what)

        self.around = instead
        try:
            yield
        finally:
            self.around = before

    def roots(self) -> list[tuple[str, nn.Module]]:
        """Name and module of the outermost ones that run in the callables."""
        return list(self._roots)

    def note_roots(self, roots: Iterable[tuple[str, nn.Module]]) -> None:
        """These run in the callables."""
        self._roots = {id(module): (name, module) for name, module in roots}.values()

    def is_idle(self) -> bool:
        """True if nothing is in flight but weight gradients of a step that will not go on."""
        if self._waiting and self.cursor is not None and self.cursor.expected.phase is Phase.WEIGHT_GRADIENT:
            return False  # Whoever forgets them is told.
        return self._num_open == len(self._waiting)

    def report(self) -> CaptureReport:
        """What has been captured, and how it was used."""
        return self.session.report()

    def call(self, scheduled: ScheduledCallable, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Run a callable for a microbatch: a replay, or eagerly where its graphs are for something else.

        Raises:
            InputMismatchError: names every argument that is not as in the sample.
            PlanError: it is not its turn.
            StaleAddressError: a weight or buffer has moved since the capture.
            LifecycleError: the graphs are closed.
        """
        if self.around is not None:
            return self.around(self._call, scheduled, arguments, named)
        return self._call(scheduled, arguments, named)

    def _call(self, scheduled: ScheduledCallable, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        captured, signature = scheduled.captured, scheduled.signature
        if len(named) > 1:
            wanted = scheduled.keywords  # Their order does not matter.
            named = {name: named[name] for name in sorted(named, key=lambda n: (wanted.get(n, len(wanted)), n))}
        self._require_open(captured)
        if self._build is not None and not self._num_open:
            self._use_fast_path()
        chain, tensors = scheduled.chain, self._surely_as_captured(scheduled, arguments, named)
        if tensors is None or chain is None:
            tensors = self._checked(scheduled, arguments, named)
            if tensors is not None and not scheduled.has_gradient:
                return self._eager(scheduled, EagerReason.NO_GRADIENT, arguments, named)
            reason = None if tensors is None else self._why_eager(scheduled, tensors)
            if tensors is None or reason is not None:
                return self._eager(scheduled, reason or EagerReason.EVALUATION, arguments, named)
            if chain is None:
                raise LifecycleError("nothing is captured yet", where=captured.region.name, fix="capture first")
            verify(captured.watched, "before a replay")
        pair = chain.pairs[0]
        if self.cursor is not None:
            self.cursor.check(scheduled.forward)
            if self.cursor.begins_anew(scheduled.forward):
                self._give_up_waiting()
        if pair.num_in_flight or not chain.lane.allows(pair.forward_position):
            raise PlanError(
                f"{scheduled.forward} came while a microbatch in flight needs its memory",
                where=captured.region.name,
                fix="run the backward first, or let go of the result of a forward that will have none; for several "
                "microbatches in flight give their order (_order)",
            )
        if chain.lane.holds_results(pair.forward_position):
            chain.lane.copy_held_results()
            return self._eager(scheduled, EagerReason.RESULT_HELD, arguments, named)
        loaded = self._copies.originals(pair, tensors) if pair.chained else tensors
        if pair.overwrites_what_is_in_use(loaded):
            return self._eager(scheduled, EagerReason.PLACE_IN_USE, arguments, named)
        self._takes_turn(scheduled)
        run = self._run(scheduled, chain)
        result = run.start(tensors, arguments, named, signature.ambient.key, loaded=loaded)
        if pair.copies_results and scheduled.is_read_in_place:
            self._copies.note(pair, flatten(result)[0])
        return result

    def weight_gradients(self, scheduled: ScheduledCallable) -> None:
        """Compute the weight gradients of a microbatch whose backward has run, and accumulate them.

        Raises:
            PlanError: it is not their turn, or they have none.
            StaleAddressError: a gradient has moved.
            LifecycleError: the graphs are closed; a result was changed in place, or a parameter got a hook meanwhile.
        """
        self._require_open(scheduled.captured)
        where = scheduled.captured.region.name
        turn = scheduled.weight_gradients
        if self.cursor is None or turn is None:
            raise PlanError(
                "its backward computes the gradients of the weights as well; they have no turn of their own",
                where=where,
                fix="leave backward_dw() out, or give _order with an entry -n - 0.5 for each backward -n",
            )
        if not scheduled.has_gradient:
            return
        self.cursor.check(turn)
        run = self._waiting.get(scheduled)
        if run is None:
            raise LifecycleError(
                "its backward has failed", where=where, fix="let go of the results of the step, and begin it anew"
            )
        run.prepare_weight_gradients()
        self.cursor.take(turn)
        del self._waiting[scheduled]
        run.weight_gradients()

    def _require_open(self, captured: CapturedCallable) -> None:
        if self.session.is_closed:
            raise LifecycleError(
                "its graphs were reset", where=captured.region.name, fix="make graphed callables again"
            )

    def _run(self, scheduled: ScheduledCallable, chain: Chain) -> ChainRun:
        def before_backward(_last: GraphPair) -> None:
            self._backward(scheduled)

        triple = chain.pairs[0]
        if isinstance(triple, GraphTriple):
            wait = partial(self._waiting.__setitem__, scheduled)
            return TripleRun(chain, triple, self._closed, before_backward, wait)
        return ChainRun(chain, 0, self._closed, before_backward)

    def _give_up_waiting(self) -> None:
        """The step will not go on."""
        for run in self._waiting.values():
            run.close()
        self._waiting.clear()

    def captured(self, scheduled: Sequence[ScheduledCallable]) -> None:
        """All of these have their graphs: let the compiled part look at them, as soon as it is there."""
        self._build, self._scheduled = Build(os.environ), scheduled
        self._use_fast_path()

    def _use_fast_path(self) -> None:
        fast = self._build.poll() if self._build is not None else None
        if self._build is not None and not self._build.is_under_way:
            self._build = None
        for each in self._scheduled if fast is not None else ():
            if each.chain is not None and fast is not None:
                add_backward(fast, each.chain)
                if each.has_gradient:
                    captured, each.pattern = each.captured, pattern_of(fast, each.signature)
                    each.facts = callable_facts(fast, each.chain.pairs[0], captured.attributes, captured.watched)

    # ----- which way

    def _surely_as_captured(
        self, scheduled: ScheduledCallable, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Sequence[Tensor] | None:
        """The arguments, if surely all is as in the sample; ``None``: look closer."""
        pattern, facts = scheduled.pattern, scheduled.facts
        if pattern is None or facts is None or not facts.hold():
            return None
        return pattern.flat(arguments, named)

    def _checked(
        self, scheduled: ScheduledCallable, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Sequence[Tensor] | None:
        """The argument tensors, flat; ``None`` for a call in modes that the graph is not for."""
        signature, captured = scheduled.signature, scheduled.captured
        if not torch.is_grad_enabled() or captured.training != signature.training:
            return None
        ambient = ambient_key(self.session.device.type)
        if (
            scheduled.guard is not None
            and not named
            and ambient == signature.ambient.key
            and all(type(argument) is Tensor for argument in arguments)
            and len(arguments) == len(signature.layouts)
            and scheduled.guard(*arguments)
        ):
            return arguments
        tensors, _ = flatten((arguments, named))
        refuse_sparse(tensors, (arguments, named), captured.names, captured.region.name)
        given = Signature.of((arguments, named), device_type=self.session.device.type, modules=captured.region.modules)
        differences = named_differences(signature, given, captured.names)
        if differences:
            raise InputMismatchError(
                "; ".join(differences),
                where=captured.region.name,
                fix="call it as in sample_args and sample_kwargs, or make other graphs for other arguments",
            )
        return tensors

    def _why_eager(self, scheduled: ScheduledCallable, tensors: Sequence[Tensor]) -> EagerReason | None:
        never = never_replayed()
        if never is not None:
            return never
        if len(tensors) > 1 and repeated_in(tensors) != scheduled.signature.repeated:
            return EagerReason.OTHER_SIGNATURE  # One tensor for several arguments, or no longer.
        attributes = scheduled.captured.attributes
        changed = attributes.changed() if attributes is not None else ()
        if changed:
            scheduled.captured.stats.last_detail = changed[0]
            return EagerReason.CHANGED_ATTRIBUTE
        if scheduled.chain is not None and scheduled.chain.pairs[0].has_new_hook():
            return EagerReason.NEW_HOOK
        return None

    def _eager(
        self, scheduled: ScheduledCallable, reason: EagerReason, arguments: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        captured = scheduled.captured
        captured.stats.eager_calls[reason] += 1
        has_turn = self.cursor is not None and reason in _IN_TURN
        if not has_turn:
            return captured.region.function(*arguments, **named)
        self._takes_turn(scheduled)
        begins = partial(self._backward, scheduled)
        if scheduled.weight_gradients is not None:
            wait = partial(self._waiting.__setitem__, scheduled)
            run = EagerTriple(captured.region.function, captured.region.name, self._closed, begins, wait)
            return run.start(arguments, named)
        return EagerForward(begins, self._closed).run(captured.region.function, *arguments, **named)

    # ----- the order

    def _takes_turn(self, scheduled: ScheduledCallable) -> None:
        if self.cursor is not None:
            self.cursor.take(scheduled.forward)
        self._num_open += 1

    def _backward(self, scheduled: ScheduledCallable) -> None:
        if self.cursor is not None:
            self.cursor.take(scheduled.backward)

    def _closed(self) -> None:
        self._num_open -= 1


class GraphedCallable:
    """A callable for one microbatch, as graphs. Same arguments and results as the original.

    Results may be kept: no replay overwrites one that somebody holds.
    """

    def __init__(
        self, graphs: CallableGraphs, scheduled: ScheduledCallable, around: CurrentMicrobatch | None = None
    ) -> None:
        self._graphs, self._scheduled, self._around = graphs, scheduled, around

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run it, with the hooks of the module around it. See :func:`graphstep.make_graphed_callables` for errors."""
        if self._around is None:
            return self._graphs.call(self._scheduled, arguments, named)
        with self._around.entered(self._scheduled) as module:
            return module(*arguments, **named)

    def backward_dw(self) -> None:
        """Compute the weight gradients of this microbatch, where ``_order`` has an entry for them, and accumulate them.

        Raises:
            PlanError: names what was expected and what came; or there is no such entry.
            LifecycleError: a result of the forward was changed in place, or a parameter got a hook, meanwhile.
            StaleAddressError: a gradient has moved.
        """
        self._graphs.weight_gradients(self._scheduled)

    @property
    def graphs(self) -> CallableGraphs:
        """Owner of its graphs, and of those of all callables that were given with it."""
        return self._graphs

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
        self._scheduled: ScheduledCallable | None = None

    @property
    def graphs(self) -> CallableGraphs:
        """Owner of its graphs."""
        return self._graphs

    @contextmanager
    def entered(self, scheduled: ScheduledCallable) -> Iterator[nn.Module]:
        """A call of the module in the body is for this microbatch."""
        before, self._scheduled = self._scheduled, scheduled
        try:
            yield self._module
        finally:
            self._scheduled = before

    def report(self) -> CaptureReport:
        """What was captured with it, and how it was used."""
        return self._graphs.report()

    def reset(self) -> None:
        """Free its graphs and those of all callables that were given with it. May be called twice."""
        self._graphs.close()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Replay the microbatch whose call is under way; a call of the module by itself runs as it is."""
        scheduled = self._scheduled
        if scheduled is None:
            return self._function(*arguments, **named)
        return self._graphs.call(scheduled, arguments, named)
