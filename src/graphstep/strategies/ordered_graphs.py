"""Graphs of a model's layers in the order of a schedule: replays anywhere else in it are errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import nn

from graphstep.capture.chain import Chain, Handover
from graphstep.capture.chain_run import ChainRun
from graphstep.capture.eager_triple import EagerTriple
from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.graph_triple import GraphTriple
from graphstep.capture.plan import Key, ObservedCall, Phase, Plan, PlanObserver, Variant
from graphstep.capture.reasons import EagerReason
from graphstep.capture.region import Region
from graphstep.capture.session import GraphSession
from graphstep.capture.triple_run import TripleRun
from graphstep.config import CapturePolicy, CudaGraphConfig, CudaGraphImpl, MismatchPolicy
from graphstep.engine import torch_private
from graphstep.errors import CaptureError, ConfigError, LifecycleError, PlanError, Problem
from graphstep.strategies.eager_forward import EagerForward
from graphstep.strategies.local_calls import RegionCalls
from graphstep.strategies.local_capture import RegionFailedError
from graphstep.strategies.local_layers import Named
from graphstep.strategies.manager import CudaGraphManager
from graphstep.strategies.order_cursor import OrderCursor, Turn
from graphstep.strategies.order_steps import OrderStep
from graphstep.strategies.ordered_calls import OrderedCalls
from graphstep.strategies.ordered_plan import ordered_plan
from graphstep.strategies.recorded_passes import RecordedPasses, joined
from graphstep.strategies.waiting_weights import Place, WaitingWeights

_NOT_OF_THE_STEP: Final = frozenset({EagerReason.NESTED_CAPTURE, EagerReason.TRANSFORMED})
"""Calls that are no part of a training step."""
_LAYERS: Final = "the layers"
_MAX_RECORDED: Final = 1 << 16
"""Events of one step that are recorded, for loops that never end a step."""
_MAX_SIGNATURES: Final = 64
"""Signatures of a layer that are recorded, for loops that never come to a capture."""


@dataclass(slots=True, eq=False)
class _Microbatch:
    """What runs of a chunk between one forward turn and the next."""

    turn: Turn
    place: int
    """Of the layer that came last, as far as it came by here."""
    chain: Chain | None = None
    """What runs now: its further layers do not come by here."""
    has_backward: bool = False
    """The turn of its backward is taken."""
    is_over: bool = False
    """The turn of its weight gradients is taken."""


class OrderedGraphs(CudaGraphManager):
    """Like its base, with the plan of a schedule in place of an observed one.

    The forward of a chunk takes its turn when the first of its layers runs, whichever that is, and the backward
    likewise. So a microbatch may skip layers, and layers that run eagerly keep the turn. Weight gradients of their own
    come for all layers of a chunk at once, see :meth:`weight_gradients`.

    Args:
        chunks: the model chunks of this rank.
        config: what to capture and how; ``impl`` is ``transformer_engine``. Whatever ``policy`` says (but for ``off``),
            what cannot be captured is an error.
        session: owner of the graphs; by default a new one on the device of the first parameter.

    Raises:
        ConfigError: nothing to capture, or see the base. No ``forward`` is replaced then.
    """

    _impls: ClassVar[frozenset[CudaGraphImpl]] = frozenset({CudaGraphImpl.transformer_engine})

    def __init__(
        self, chunks: Sequence[nn.Module], config: CudaGraphConfig, *, session: GraphSession | None = None
    ) -> None:
        self._cursor: OrderCursor | None = None
        self._current: dict[int, _Microbatch] = {}
        """For each chunk, the forward whose turn was last."""
        self._is_recorded = False
        self._closes_when_idle = False
        self._eager_in_flight: set[object] = set()
        """Eager forwards of the step whose backward, or weight gradients, may still come, by a token each."""
        self._waiting = WaitingWeights()
        self._microbatches: dict[Place, _Microbatch] = {}
        """Those whose weight gradients are to come."""
        self._has_weight_turns = False
        """Weight gradients have turns of their own."""
        self._chunks = tuple(chunks)
        model = chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks)
        if config.policy is CapturePolicy.auto:
            config = replace(config, policy=CapturePolicy.required)
        super().__init__(model, config, session=session, is_automatic=False)
        # Nothing is captured on demand: what was not seen before the capture runs eagerly, or is an error.
        if self.on_mismatch is MismatchPolicy.recapture:
            self.on_mismatch = MismatchPolicy.eager
        try:
            self._apart = self._chunk_of = self._find_chunks(chunks)
        except ConfigError:
            self._put_back()
            raise
        self._recorded = RecordedPasses(self._chunk_of)
        self._places: Mapping[Region, int] = {}
        """Of each captured region among the layers of its chunk."""
        self._has_run = self._is_held = False
        """Since :meth:`before_call` has last found nothing in flight; and whether a held result was in the way."""
        self._num_held_steps = 0
        self._plan, self._handovers = Plan(), dict[Key, Handover]()
        self.num_slots: tuple[int, ...] = ()
        """Sets of graphs of each chunk: as many as microbatches are in flight."""

    def _make_calls(self, region: Region, modules: Named) -> RegionCalls:
        return OrderedCalls(region, modules, self, self.session.stats(region.name, region.kind))

    def _find_chunks(self, chunks: Sequence[nn.Module]) -> Mapping[Region, int]:
        owners: dict[int, int] = {}
        for number, chunk in enumerate(chunks):
            for module in chunk.modules():
                owners.setdefault(id(module), number)
        captured = {id(module.module) for module in self._modules}
        for number, chunk in enumerate(chunks):
            if any(id(module) in captured and owners[id(module)] != number for module in chunk.modules()):
                what = f"model chunk {number + 1} has a layer of an earlier one; each is captured for one chunk"
                raise ConfigError(Problem("te-shared-layer", what, "model", "give each chunk layers of its own"))
        return {calls.region: owners[id(module.module)] for module in self._modules for calls in module.regions}

    @property
    def is_captured(self) -> bool:
        """True once there are graphs."""
        return self._cursor is not None

    @property
    def is_recorded(self) -> bool:
        """True once every layer was seen forward and backward, or was seen to need no backward."""
        observer = self.observer
        if not self._is_recorded and observer is not None:
            seen = self._recorded.trained_regions(observer.plan) | self.observed.without_gradient
            self._is_recorded = set(self._chunk_of) <= seen
        return self._is_recorded

    # ----- what the calls ask

    def before_call(self) -> bool:
        """See the base; and replace graphs whose results callers hold for good."""
        # What comes by here is not what a run expects: a layer was skipped, and its results hold memory.
        for now in self._current.values():
            for receiver in now.chain.receivers if now.chain is not None else ():
                receiver.expect_nothing()
        if self._has_run and not self._num_in_flight():
            self._num_held_steps = self._num_held_steps + 1 if self._is_held else 0
            self._has_run = self._is_held = False
            if self._num_held_steps >= self._config.capture_after:
                self._num_held_steps = 0
                self._replace()
        return super().before_call()

    def _num_in_flight(self) -> int:
        return self._num_open + len(self._eager_in_flight)

    def _is_idle(self) -> bool:
        """True if nothing is in flight but weight gradients of a step that will not go on."""
        if self._waiting and self._cursor is not None and self._cursor.expected.phase is Phase.WEIGHT_GRADIENT:
            return False  # Whoever forgets them is told.
        return self._num_in_flight() == len(self._waiting)

    def observed_call(self) -> PlanObserver | None:
        """Calls are recorded until the capture."""
        observer = self.observer
        if observer is None or self._cursor is not None:
            return None
        if self.is_recorded:
            if observer.plan.events and not observer.num_in_flight:
                self._recorded.take(observer.plan)
            is_full = self._recorded.num_signatures() >= _MAX_SIGNATURES
            if is_full or len(observer.plan.events) > _MAX_RECORDED:
                return None
        return observer

    def before_run(self, chain: Chain, index: int, *, is_verified: bool = False) -> Callable[[GraphPair], None] | None:
        """It is the turn of a chunk when a layer begins, and of its backward when the first backward half does."""
        check = super().before_run(chain, index, is_verified=is_verified)
        now = self._turn_of(chain.pairs[index].region)
        if now is None:
            return check
        now.chain = chain
        cursor = self._cursor

        def take_backward(last: GraphPair) -> None:
            self._backward_begins(now, cursor)
            if check is not None:
                check(last)

        return take_backward

    def open_run(self, chain: Chain, index: int, *, is_verified: bool = False) -> ChainRun:
        """See the base; weight gradients may have a turn of their own."""
        triple = chain.pairs[index]
        if not isinstance(triple, GraphTriple):
            return super().open_run(chain, index, is_verified=is_verified)
        check = self.before_run(chain, index)
        now = self._current[self._chunk_of[triple.region]]
        self._num_open += 1
        return TripleRun(chain, triple, self._run_closed, check, partial(self._waiting.add, _place(now)))

    def not_replayed(self, calls: RegionCalls, reason: EagerReason) -> Callable[..., Any]:
        """Refuse a call out of turn; any other one takes the turn of its chunk as a replay would."""
        function = calls.region.function
        # Of a step in training, one layer may still be in evaluation mode.
        is_training = torch.is_grad_enabled() and any(chunk.training for chunk in self._chunks)
        is_evaluation = reason is EagerReason.EVALUATION and not is_training
        if is_evaluation or reason in _NOT_OF_THE_STEP:
            return function
        now = self._turn_of(calls.region)
        if now is None:
            return function
        if reason in (EagerReason.RESULT_HELD, EagerReason.PLACE_IN_USE):
            self._is_held = True
            self._copy_held_results(calls)
        begins, token = partial(self._backward_begins, now, self._cursor), object()
        self._eager_in_flight.add(token)
        ends = partial(self._eager_in_flight.discard, token)
        if not self._has_weight_turns:
            return partial(EagerForward(begins, ends).run, function)
        wait = partial(self._waiting.add, _place(now))
        run = EagerTriple(function, calls.region.name, ends, begins, wait)
        return lambda *arguments, **named: run.start(arguments, named)

    def _turn_of(self, region: Region) -> _Microbatch | None:
        """The microbatch that a call belongs to; the first call of one takes the turn of its forward.

        Raises:
            PlanError: it is not its turn.
        """
        cursor, place = self._cursor, self._places.get(region)
        if cursor is None or place is None:
            return None
        self._has_run = True
        chunk = self._chunk_of[region]
        now = self._current.get(chunk)
        if now is None or now.has_backward or place <= self._latest_place(now):
            turn = cursor.next_turn(_LAYERS, chunk, Phase.FORWARD)
            expected = cursor.expected
            try:
                if cursor.begins_anew(turn):
                    self._waiting.give_up()
                    self._microbatches.clear()
                cursor.take(turn)
            except PlanError as error:
                named = replace(turn, name=region.name)
                raise PlanError(f"expected {expected}, and {named} came", where=error.where, fix=error.fix) from None
            now = self._current[chunk] = _Microbatch(turn, place)
            if self._has_weight_turns:
                self._microbatches[_place(now)] = now
        now.place, now.chain = place, None
        return now

    def _latest_place(self, now: _Microbatch) -> int:
        span = now.chain.lane.latest if now.chain is not None else None
        if now.chain is None or span is None:
            return now.place
        done = (pair for pair in now.chain.pairs if pair.forward_position <= span.forward_position)
        return max([now.place, *(self._places[pair.region] for pair in done)])

    def _backward_begins(self, now: _Microbatch, cursor: OrderCursor | None) -> None:
        # After the graphs are deleted there is no order any more.
        if cursor is None or cursor is not self._cursor:
            return
        if not now.has_backward:
            cursor.take(replace(now.turn, phase=Phase.BACKWARD))
            now.has_backward = True
        elif now.is_over:
            raise PlanError(
                f"{replace(now.turn, phase=Phase.BACKWARD)} goes on after its weight gradients were computed",
                where=f"model chunk {now.turn.chunk + 1}",
                fix="call backward_dw() when the whole backward of the microbatch has run",
            )

    def weight_gradients(self, chunk: int) -> None:
        """Accumulate the weight gradients of the next microbatch of a chunk. See :meth:`TECudaGraphHelper.backward_dw`.

        Raises:
            PlanError: it is not their turn.
            LifecycleError: a result was changed in place meanwhile, a parameter got a hook, or a backward is under way.
            StaleAddressError: a gradient has moved.
        """
        cursor = self._cursor
        if cursor is None:
            return  # Eager backwards compute them; those that were in flight at the end of the graphs did so too.
        if chunk not in set(map(self._chunk_of.__getitem__, self._places)):
            return  # Nothing of it is captured, and it has no turns.
        if torch_private.backward_pass() is not None:
            raise LifecycleError(
                "a backward is under way, and more weight gradients may come",
                where="backward_dw",
                fix="call backward_dw() after backward() has returned, and not in a hook",
            )
        turn = cursor.next_turn(_LAYERS, chunk, Phase.WEIGHT_GRADIENT)
        cursor.check(turn)
        place = turn.chunk, turn.microbatch
        self._waiting.prepare(place)
        cursor.take(turn)
        self._microbatches.pop(place).is_over = True
        self._waiting.compute(place)

    # ----- capture

    def capture(self, steps: Sequence[OrderStep], is_wanted: Callable[[Variant], bool] = lambda _variant: True) -> None:
        """Capture every layer for a schedule, with each signature that it was seen with.

        Args:
            steps: the schedule.
            is_wanted: true for the signatures that go first if there are more than ``max_signatures``.

        Raises:
            LifecycleError: not every layer has been seen forward and backward, or something is in flight.
            CaptureError: names the layer. Everything runs eagerly as before, and it may be tried again.
        """
        self.session.require_open()
        observer = self.observer
        if not self._chunk_of:
            return
        if observer is None or not self.is_recorded:
            raise self._not_recorded(observer)
        # With one microbatch at a time, it does not matter what becomes of forwards that nobody has used.
        is_one_by_one = sum(step.phase is Phase.FORWARD for step in steps) == 1
        num_in_flight = 0 if is_one_by_one else observer.num_in_flight
        if num_in_flight:
            raise LifecycleError(
                f"a step is under way: a backward may still come for {num_in_flight} calls of layers",
                where="create_cudagraphs",
                fix="create the graphs between two steps; let go of losses whose backward never runs, and compute them "
                "under torch.no_grad()",
            )
        if observer.plan.reused:
            names = ", ".join(sorted(region.name for region in observer.plan.reused))
            raise CaptureError(
                f"called several times in a microbatch: {names}; a schedule has one turn for each layer",
                where="create_cudagraphs",
                fix="use a layer once, or graphstep.attach, which captures each use",
            )
        self._recorded.take(observer.plan)
        passes = self._recorded.plans(observer.plan, is_wanted, self._config.max_signatures)
        if not passes:
            names = ", ".join(region.name for region in self._chunk_of)
            raise CaptureError(
                f"there is nothing to capture: no result of {names} needs a gradient",
                where="create_cudagraphs",
                fix="train parameters of a layer, or of what comes before the layers; else leave the graphs out",
            )
        found = [ordered_plan(each, self.observed.handovers, self._chunk_of, steps) for each in passes]
        plan = joined(each.plan for each in found)
        handovers = {key: handover for each in found for key, handover in each.handovers.items()}
        self._check_attributes()
        self._capture_or_name(plan, handovers)
        self._plan, self._handovers = plan, handovers
        self._places = self._recorded.order_of(passes)
        self.num_slots = found[0].num_slots
        for region, calls in self._regions.items():
            if region not in self._places:
                is_frozen = region in self.observed.without_gradient
                calls.why_not = EagerReason.NO_GRADIENT if is_frozen else EagerReason.TOO_MANY_SIGNATURES
        self.observed.forget()
        self.observer = None
        # The order does not wait for a chunk without anything to capture.
        chunks = {self._chunk_of[region] for region in self._places}
        turns = [Turn(_LAYERS, step.chunk, step.microbatch, step.phase) for step in steps if step.chunk in chunks]
        self._has_weight_turns = any(turn.phase is Phase.WEIGHT_GRADIENT for turn in turns)
        self._cursor = OrderCursor(turns, self._is_idle)

    def _not_recorded(self, observer: PlanObserver | None) -> LifecycleError:
        plan = observer.plan if observer is not None else Plan()
        seen = self._recorded.trained_regions(plan) | self.observed.without_gradient
        missing = [calls for region, calls in self._regions.items() if region not in seen]
        reasons = sorted({str(reason) for calls in missing for reason in calls.stats.eager_calls})
        return LifecycleError(
            f"no forward and backward was seen of {', '.join(calls.region.name for calls in missing)}"
            + (f" (calls so far: {', '.join(reasons)})" if reasons else ""),
            where="create_cudagraphs",
            fix="run at least one training step before, in which each layer takes part; leave out layers that never do",
        )

    def _copy_held_results(self, calls: RegionCalls) -> None:
        """Have callers get copies of the results that are in the way of a call, from their next one on."""
        pairs = [pair for each in self._regions.values() for pair in each.pairs() if not pair.num_in_flight]
        for mine in calls.pairs():
            behind = (
                pair for pair in pairs if pair.lane is mine.lane and pair.forward_position >= mine.forward_position
            )
            for pair in {*behind, *(source for source in mine.sources() if not source.num_in_flight)}:
                pair.copies_results = pair.copies_results or pair.is_held()

    def _replace(self) -> None:
        """Capture all graphs anew, in other memory than what callers hold, and let go of the old ones.

        What takes a result that callers get a copy of gets a static input of its own.
        """
        regions = self._regions.values()
        kept = {pair.region for calls in regions for pair in calls.pairs() if pair.copies_results}
        if not kept or any(calls.is_captured and calls.current is None for calls in regions):
            return
        old = dict.fromkeys(chain for calls in regions for links in calls.links.values() for chain, _ in links)
        plan = Plan(self._plan.events, {k: _without(kept, c) for k, c in self._plan.calls.items()}, self._plan.reused)
        try:
            self._capture_or_name(plan, self._handovers)
        except CaptureError as error:
            warnings.warn(f"layers whose results are held go on eagerly: {error}", UserWarning, stacklevel=5)
            return
        self._plan = plan
        for chain in old:
            self._chains.drop(chain, self._regions)
        for region in kept:
            for pair in self._regions[region].pairs():
                pair.copies_results = True

    def _capture_or_name(self, plan: Plan, handovers: Mapping[Key, Handover]) -> None:
        """Capture; what fails in a graph of several regions is captured by itself, to name it."""
        try:
            self._capture(plan, handovers, self._config.merge_layers)
        except RegionFailedError as error:
            if not error.is_of_several:
                raise
            self._capture(plan, handovers, None)

    def _capture_observed(self) -> None:
        """Nothing is captured on demand."""

    def set_manual_hooks(self, hook: Callable[[nn.Module], object] | None) -> None:
        """Call this, or what the chunks make for it, with each captured module that has parameters, before replays."""
        made = [hook or _hook_of(chunk) for chunk in self._chunks]
        for module in self._modules:
            for calls in module.regions:
                found = made[self._chunk_of[calls.region]]
                owners = [inner for inner in calls.region.modules if [*inner.parameters(recurse=False)]]
                calls.manual_hook = partial(_call_with_each, found, owners) if found is not None else None

    # ----- end

    def delete(self) -> None:
        """Put the layers' own ``forward`` back, and free the graphs as soon as nothing is in flight.

        What is in flight keeps its backward, which computes weight gradients as well from now on; those that wait for
        their turn are computed here. May be called twice.

        Raises:
            LifecycleError, StaleAddressError: those cannot be computed, see :meth:`weight_gradients`.
        """
        self._put_back()
        self._cursor = None
        self._closes_when_idle = True
        try:
            self._waiting.compute_all()
        finally:
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        if not self._num_open and not self._waiting:
            self.close()

    def _run_closed(self) -> None:
        super()._run_closed()
        if self._closes_when_idle:
            self._close_if_idle()

    def close(self) -> None:
        """See the base."""
        self._cursor = None
        self._waiting.give_up()
        super().close()


def _place(microbatch: _Microbatch) -> Place:
    return microbatch.turn.chunk, microbatch.turn.microbatch


def _without(regions: Collection[Region], call: ObservedCall) -> ObservedCall:
    """A call whose arguments are not taken from where the results of these lie."""
    is_cut = [origin is not None and origin.variant.region in regions for origin in call.origins]
    origins = tuple(None if cut else origin for cut, origin in zip(is_cut, call.origins, strict=True))
    return replace(call, origins=origins, follows=None if any(is_cut) else call.follows)


def _hook_of(chunk: nn.Module) -> Callable[[nn.Module], object] | None:
    make = getattr(chunk, "_make_forward_pre_hook", None)
    return make() if callable(make) else None


def _call_with_each(hook: Callable[[nn.Module], object], modules: Sequence[nn.Module]) -> None:
    for module in modules:
        hook(module)
