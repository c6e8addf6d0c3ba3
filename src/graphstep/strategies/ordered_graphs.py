"""Graphs of a model's layers in the order of a schedule: replays anywhere else in it are errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from graphstep.capture.chain import Chain
from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.plan import Phase, PlanObserver
from graphstep.capture.reasons import EagerReason
from graphstep.capture.region import Region
from graphstep.capture.session import GraphSession
from graphstep.capture.tree import flatten
from graphstep.config import CudaGraphConfig, CudaGraphImpl, MismatchPolicy
from graphstep.errors import CaptureError, ConfigError, LifecycleError, PlanError, Problem
from graphstep.strategies.local_calls import RegionCalls
from graphstep.strategies.manager import CudaGraphManager
from graphstep.strategies.order_cursor import OrderCursor, Turn
from graphstep.strategies.order_steps import OrderStep
from graphstep.strategies.ordered_plan import ordered_plan

_REFUSED: Final = frozenset({EagerReason.MORE_IN_FLIGHT, EagerReason.OUT_OF_ORDER, EagerReason.PLACE_IN_USE})
"""Only a call out of turn has these, unless a result is held."""
_NOT_OF_THE_STEP: Final = frozenset({EagerReason.NESTED_CAPTURE, EagerReason.TRANSFORMED})
"""Calls that are no part of a training step."""
_LAYERS: Final = "the layers"


class OrderedGraphs(CudaGraphManager):
    """Like its base, with the plan of a schedule in place of an observed one.

    Args:
        chunks: the model chunks of this rank.
        config: what to capture and how; ``impl`` is ``transformer_engine``.
        session: owner of the graphs.

    Raises:
        ConfigError: nothing to capture, or see the base.
    """

    _impls: ClassVar[frozenset[CudaGraphImpl]] = frozenset({CudaGraphImpl.transformer_engine})

    def __init__(self, chunks: Sequence[nn.Module], config: CudaGraphConfig, *, session: GraphSession) -> None:
        self._cursor: OrderCursor | None = None
        self._current: dict[int, Turn] = {}
        """For each chunk, the forward whose turn was last."""
        self._is_recorded = False
        self._eager_in_flight: set[int] = set()
        """Eager forwards of the step whose backward may still come, by a number each."""
        self._chunks = tuple(chunks)
        model = chunks[0] if len(chunks) == 1 else nn.ModuleList(chunks)
        super().__init__(model, config, session=session, is_automatic=False)
        self.on_mismatch = MismatchPolicy.error
        self._apart = self._chunk_of = self._find_chunks(chunks)
        self._first: set[Region] = set()
        self._last: set[Region] = set()
        self.num_slots: tuple[int, ...] = ()
        """Sets of graphs of each chunk: as many as microbatches are in flight."""

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
        """True once every layer was seen forward and backward."""
        observer = self.observer
        if not self._is_recorded and observer is not None:
            trained = {variant.region for variant, _ in observer.plan.trained()}
            self._is_recorded = set(self._chunk_of) <= trained
        return self._is_recorded

    # ----- what the calls ask

    def observed_call(self) -> PlanObserver | None:
        """Calls are recorded until every layer was seen."""
        return None if self.is_recorded else super().observed_call()

    def before_run(self, chain: Chain, index: int) -> Callable[[GraphPair], None] | None:
        """It is the turn of a chunk when its first layer begins, and of its backward once a run reached its last."""
        forward = self._takes_turn(chain.pairs[index].region)
        check = super().before_run(chain, index)
        cursor = self._cursor
        if forward is None or cursor is None or chain.pairs[-1].region not in self._last:
            return check

        def take_backward(last: GraphPair) -> None:
            if last.region in self._last:
                cursor.take(_backward_of(forward))
            if check is not None:
                check(last)

        return take_backward

    def not_replayed(self, calls: RegionCalls, reason: EagerReason) -> Callable[[Any], None] | None:
        """Refuse a call out of turn; count any other one as the turn of its chunk."""
        cursor = self._cursor
        # Of a step in training, one layer may still be in evaluation mode.
        is_evaluation = reason is EagerReason.EVALUATION and not (torch.is_grad_enabled() and self._model.training)
        if cursor is None or is_evaluation or reason in _NOT_OF_THE_STEP:
            return None
        held = {pair.lane for pair in calls.pairs()} if reason is EagerReason.RESULT_HELD else set()
        if reason is EagerReason.PLACE_IN_USE:
            held = {source.lane for pair in calls.pairs() for source in pair.sources() if source.is_held()}
        if reason in _REFUSED and not held:
            turn = cursor.next_forward(calls.region.name, self._chunk_of[calls.region])
            raise PlanError(
                f"expected {cursor.expected}, and {turn} came ({reason})",
                where=calls.region.name,
                fix="run forwards and backwards in the order of the schedule that was captured; after an error in the "
                "middle of a step let go of its results",
            )
        for lane in held:
            lane.copy_held_results()
        forward = self._takes_turn(calls.region)
        in_flight = _EagerForward(self._eager_in_flight)

        def watch(result: Any) -> None:
            wanted = [tensor for tensor in flatten(result)[0] if tensor.requires_grad]
            if wanted:
                torch.autograd.graph.register_multi_grad_hook(wanted, backward_begins, mode="any")

        def backward_begins(_gradient: Tensor) -> None:
            in_flight.end()
            if forward is not None and calls.region in self._last:
                cursor.take(_backward_of(forward))

        return watch

    def _takes_turn(self, region: Region) -> Turn | None:
        if self._cursor is None:
            return None
        chunk = self._chunk_of[region]
        if region in self._first:
            turn = self._cursor.next_forward(_LAYERS, chunk)
            self._cursor.take(turn)
            self._current[chunk] = turn
        return self._current.get(chunk)

    # ----- capture

    def capture(self, steps: Sequence[OrderStep]) -> None:
        """Capture every layer for a schedule.

        Raises:
            LifecycleError: not every layer has been seen forward and backward, or something is in flight.
            CaptureError: names the layer. Everything runs eagerly as before, and it may be tried again.
        """
        self.session.require_open()
        observer = self.observer
        if observer is None or not self.is_recorded or observer.num_in_flight or self._num_open:
            seen = {variant.region for variant, _ in observer.plan.trained()} if observer is not None else set()
            missing = [region.name for region in self._chunk_of if region not in seen]
            raise LifecycleError(
                f"no forward and backward was seen of {', '.join(missing)}" if missing else "a step is under way",
                where="create_cudagraphs",
                fix="run at least one training step before, and create the graphs between two steps",
            )
        if observer.plan.reused:
            names = ", ".join(region.name for region in observer.plan.reused)
            raise CaptureError(
                f"{names} runs several times in a microbatch; a schedule has one turn for each layer",
                where="create_cudagraphs",
                fix="use a layer once, or graphstep.attach, which captures each use",
            )
        handovers = dict(self.observed.handovers)
        found = ordered_plan(observer.plan, handovers, self._chunk_of, steps)
        self._check_attributes()
        self._capture(found.plan, found.handovers, self._config.merge_layers)
        self.observed.forget()
        self.observer = None
        order: dict[int, list[Region]] = {}
        for variant, _ in found.plan.calls:
            order.setdefault(self._chunk_of[variant.region], []).append(variant.region)
        self._first = {regions[0] for regions in order.values()}
        self._last = {list(dict.fromkeys(regions))[-1] for regions in order.values()}
        self.num_slots = found.num_slots
        turns = [Turn(_LAYERS, step.chunk, step.microbatch, step.phase) for step in steps]
        self._cursor = OrderCursor(turns, lambda: not self._num_open and not self._eager_in_flight)

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


class _EagerForward:
    """Kept by autograd until the backward of an eager forward begins, or by nobody."""

    def __init__(self, in_flight: set[int]) -> None:
        self._in_flight = in_flight
        in_flight.add(id(self))

    def end(self) -> None:
        """Its backward begins, or will never come."""
        self._in_flight.discard(id(self))

    def __del__(self) -> None:
        self.end()


def _hook_of(chunk: nn.Module) -> Callable[[nn.Module], object] | None:
    make = getattr(chunk, "_make_forward_pre_hook", None)
    return make() if callable(make) else None


def _call_with_each(hook: Callable[[nn.Module], object], modules: Sequence[nn.Module]) -> None:
    for module in modules:
        hook(module)


def _backward_of(forward: Turn) -> Turn:
    return Turn(forward.name, forward.chunk, forward.microbatch, Phase.BACKWARD)
