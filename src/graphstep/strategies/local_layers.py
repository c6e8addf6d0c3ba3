"""A layer whose segments are partly replaced by replays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.plan import Event, Phase, PlanGuard, PlanObserver, lowest_free
from graphstep.capture.region import Region
from graphstep.capture.report import RegionStats
from graphstep.capture.session import GraphSession
from graphstep.capture.signature import Signature
from graphstep.config import CudaGraphModule
from graphstep.models.segments import Segment, SegmentedModule

Carried = tuple[Tensor, ...]


def graphed_layers(
    model: nn.Module, session: GraphSession, modules: frozenset[CudaGraphModule]
) -> tuple[GraphedLayer, ...]:
    """The layers of a model that have something to capture; empty ``modules`` means whole layers."""
    found = (
        GraphedLayer(path, layer, session, modules)
        for path, layer in model.named_modules()
        if isinstance(layer, SegmentedModule)
    )
    return tuple(layer for layer in found if layer.regions)


class GraphedLayer:
    """Runs a layer's segments: captured groups through their regions, the others as they are."""

    def __init__(
        self, path: str, layer: SegmentedModule, session: GraphSession, modules: frozenset[CudaGraphModule]
    ) -> None:
        self._layer = layer
        self._is_installed = False
        self._steps: list[RegionCalls | Segment] = []
        names = {module.value for module in modules}
        for is_captured, group in groupby(layer.segments(), key=lambda s: not names or s.kind in names):
            segments = tuple(group)
            if is_captured:
                self._steps.append(RegionCalls(_region(path, layer, segments), session))
            else:
                self._steps.extend(segments)

    @property
    def regions(self) -> tuple[RegionCalls, ...]:
        """The captured groups."""
        return tuple(step for step in self._steps if isinstance(step, RegionCalls))

    def install(self) -> None:
        """Put :meth:`forward` in place of the layer's own, on the instance. Module hooks fire as before."""
        self._layer.__dict__["forward"] = self.forward
        self._is_installed = True

    def remove(self) -> None:
        """Put the layer's own ``forward`` back. May be called twice."""
        if self._is_installed:
            self._layer.__dict__.pop("forward", None)
            self._is_installed = False

    def start_observing(self, observer: PlanObserver) -> None:
        """Have every region report its calls."""
        for calls in self.regions:
            calls.observer = observer

    def stop_observing(self) -> None:
        """Run eagerly without reporting."""
        for calls in self.regions:
            calls.observer = None

    def use(self, pairs: Mapping[tuple[Region, int], GraphPair], guard: PlanGuard) -> None:
        """Replay these pairs from now on."""
        for calls in self.regions:
            calls.use([pair for (region, _), pair in sorted(pairs.items(), key=_slot) if region is calls.region], guard)

    def forward(self, hidden: Tensor, *context: Tensor) -> Tensor:
        """The layer's forward: same arguments and results."""
        carried: Carried = (hidden,)
        for step in self._steps:
            if isinstance(step, RegionCalls):
                carried = step(carried, context)
            else:
                carried = as_carried(step.fn(*carried, *context))
        return carried[0]


class RegionCalls:
    """The calls of one region: observed, replayed, or eager with a counted reason."""

    def __init__(self, region: Region, session: GraphSession) -> None:
        self.region = region
        self.observer: PlanObserver | None = None
        self._device_type = session.device.type
        self._stats: RegionStats = session.stats(region.name, region.kind)
        self._pairs: Sequence[GraphPair] = ()
        self._guard: PlanGuard | None = None
        self._busy: set[int] = set()

    def use(self, pairs: Sequence[GraphPair], guard: PlanGuard) -> None:
        """Replay ``pairs``, one a slot, in an order that ``guard`` allows."""
        self._pairs, self._guard = pairs, guard

    def __call__(self, carried: Carried, context: Carried) -> Carried:
        """Run the region on its arguments."""
        if not torch.is_grad_enabled() or not all(module.training for module in self.region.modules):
            return self._eager(carried, context, "evaluation")
        signature = Signature.of((carried, context), device_type=self._device_type, modules=self.region.modules)
        if self.observer is not None:
            return self._observed(self.observer, signature, carried, context)
        if self._guard is None:
            return self._eager(carried, context, "not captured yet")
        slot = lowest_free(self._busy)
        reason = self._why_eager(slot, signature, (*carried, *context))
        if reason:
            return self._eager(carried, context, reason)
        self._guard.enter(Event(self.region, slot, Phase.FORWARD))
        lease = _Lease(self.region, slot, self._busy, self._guard)
        result: Carried = self._pairs[slot].replay((*carried, *context), lease)
        return result

    def _why_eager(self, slot: int, signature: Signature, tensors: Sequence[Tensor]) -> str:
        """The reason why no captured pair serves a call; empty if one does."""
        if slot >= len(self._pairs):
            return "more microbatches in flight than at capture"
        if signature != self._pairs[slot].signature:
            return "another signature"
        if self._pairs[slot].moved_inputs(tensors):
            return "an argument that the model owns has moved"
        return ""

    def _eager(self, carried: Carried, context: Carried, reason: str) -> Carried:
        self._stats.eager_calls[reason] += 1
        result: Carried = self.region.function(carried, context)
        return result

    def _observed(self, observer: PlanObserver, signature: Signature, carried: Carried, context: Carried) -> Carried:
        slot = observer.forward(self.region, signature, [*carried, *context])
        result = self._eager(carried, context, "observed")
        observer.outputs(self.region, slot, result)
        differentiable = [tensor for tensor in result if tensor.requires_grad]
        if differentiable:
            torch.autograd.graph.register_multi_grad_hook(
                differentiable, lambda _: observer.backward(self.region, slot), mode="any"
            )
        return result


class _Lease:
    """A slot from its forward until its backward, or until autograd drops the result."""

    def __init__(self, region: Region, slot: int, busy: set[int], guard: PlanGuard) -> None:
        self._region, self._slot, self._busy, self._guard = region, slot, busy, guard
        self._is_open = True
        busy.add(slot)
        guard.started()

    def backward_begins(self) -> None:
        """Check the order of backwards, and that this one has not run before."""
        self._guard.enter(Event(self._region, self._slot, Phase.BACKWARD))

    def close(self) -> None:
        """Give the slot back. May be called twice."""
        if self._is_open:
            self._is_open = False
            self._busy.discard(self._slot)
            self._guard.finished()

    def __del__(self) -> None:
        self.close()


def as_carried(result: Tensor | Carried) -> Carried:
    """A segment's result as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def _region(path: str, layer: SegmentedModule, segments: tuple[Segment, ...]) -> Region:
    is_whole = len(segments) == len(layer.segments())
    parts = "+".join(segment.name for segment in segments)
    kinds = "+".join(segment.kind for segment in segments)
    functions = tuple(segment.fn for segment in segments)

    def run(carried: Carried, context: Carried) -> Carried:
        for function in functions:
            carried = as_carried(function(*carried, *context))
        return carried

    modules = {id(m): m for segment in segments for owner in segment.modules for m in owner.modules()}
    return Region(
        name=path if is_whole else f"{path}.{parts}",
        kind="layer" if is_whole else kinds,
        function=run,
        modules=tuple(modules.values()),
    )


def _slot(item: tuple[tuple[Region, int], Any]) -> int:
    return item[0][1]
