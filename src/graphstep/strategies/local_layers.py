"""A layer whose segments are partly replaced by replays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from graphstep.capture import autograd_private
from graphstep.capture.attributes import Attributes
from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.plan import Event, Phase, PlanGuard, PlanObserver, lowest_free
from graphstep.capture.region import Region
from graphstep.capture.report import RegionStats
from graphstep.capture.session import GraphSession
from graphstep.capture.signature import Signature
from graphstep.config import CudaGraphModule
from graphstep.errors import ConfigError, Problem
from graphstep.models.segments import Segment, SegmentedModule

Carried = tuple[Tensor, ...]


def graphed_layers(
    model: nn.Module, session: GraphSession, modules: frozenset[CudaGraphModule]
) -> tuple[GraphedLayer, ...]:
    """The layers of a model that have something to capture; empty ``modules`` means whole layers.

    Raises:
        ConfigError: names the layers that compute something else than their segments.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    layers = [layer for layer in model.modules() if isinstance(layer, SegmentedModule)]
    found = [GraphedLayer(paths, layer, session, modules) for layer in layers]
    problems = [
        _forward_problem(paths[id(layer)], layer)
        for layer, graphed in zip(layers, found, strict=True)
        if graphed.regions
    ]
    if any(problems):
        raise ConfigError([problem for problem in problems if problem is not None])
    return tuple(layer for layer in found if layer.regions)


def _forward_problem(path: str, layer: SegmentedModule) -> Problem | None:
    own = layer.__dict__.get("forward")
    if own is None or isinstance(own, OwnForward):
        if type(layer).forward is SegmentedModule.forward:
            return None
        what, fix = "its class has a forward of its own", "put what it does into segments"
    elif isinstance(own, InstalledForward):
        what, fix = "another strategy has captured it", "close that strategy first"
    else:
        what, fix = "its forward was replaced on the instance", "undo that before building the strategy, or use a hook"
    return Problem("forward-not-segments", f"layer {path} cannot be captured: {what}", path, fix)


class GraphedLayer:
    """Runs a layer's segments: captured groups through their regions, the others as they are."""

    def __init__(
        self,
        paths: Mapping[int, str],
        layer: SegmentedModule,
        session: GraphSession,
        modules: frozenset[CudaGraphModule],
    ) -> None:
        self._layer = layer
        self._own: Any = None
        self._steps: list[RegionCalls | Segment] = []
        names = {module.value for module in modules}
        for is_captured, group in groupby(layer.segments(), key=lambda s: not names or s.kind in names):
            segments = tuple(group)
            if is_captured:
                region = _region(paths[id(layer)], layer, segments)
                self._steps.append(RegionCalls(region, [(paths[id(m)], m) for m in region.modules], session))
            else:
                self._steps.extend(segments)

    @property
    def regions(self) -> tuple[RegionCalls, ...]:
        """The captured groups."""
        return tuple(step for step in self._steps if isinstance(step, RegionCalls))

    def install(self) -> None:
        """Put :meth:`forward` in place of the layer's own, on the instance. Module hooks fire as before."""
        self._own = self._layer.__dict__.get("forward")
        self._layer.__dict__["forward"] = InstalledForward(self._layer, self.forward)

    def remove(self) -> None:
        """Put the layer's own ``forward`` back and let go of the graphs. May be called twice."""
        for calls in self.regions:
            calls.forget()
        installed = self._layer.__dict__.get("forward")
        if isinstance(installed, InstalledForward) and installed.runs(self.forward):
            del self._layer.__dict__["forward"]
            if self._own is not None:
                self._layer.__dict__["forward"] = self._own

    def start_observing(self, observer: PlanObserver) -> None:
        """Have every region report its calls."""
        for calls in self.regions:
            calls.observer = observer

    def stop_observing(self) -> None:
        """Run eagerly without reporting."""
        for calls in self.regions:
            calls.observer = None

    def start_step(self) -> None:
        """Before each step: look whether the captured values of attributes still hold."""
        for calls in self.regions:
            calls.start_step()

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
        if len(carried) != 1:
            raise TypeError(
                f"the last segment of {type(self._layer).__name__} must return one tensor, got {len(carried)}"
            )
        return carried[0]


class InstalledForward:
    """What stands in a layer's ``__dict__`` while it is captured. Copies of the layer run their own forward instead."""

    def __init__(self, layer: SegmentedModule, forward: Callable[..., Tensor]) -> None:
        self._layer, self._forward = layer, forward

    def __call__(self, *arguments: Any, **named: Any) -> Tensor:
        """Run the captured layer."""
        return self._forward(*arguments, **named)

    def runs(self, forward: Callable[..., Tensor]) -> bool:
        """True if it stands for this one."""
        return self._forward == forward

    def __reduce__(self) -> tuple[Any, ...]:
        return OwnForward, (self._layer,)


class OwnForward:
    """The ``forward`` of the class, for a copy of a captured layer: the graphs belong to the original."""

    def __init__(self, layer: SegmentedModule) -> None:
        self._layer = layer

    def __call__(self, *arguments: Any, **named: Any) -> Tensor:
        """Run the layer as it is."""
        return type(self._layer).forward(self._layer, *arguments, **named)


class RegionCalls:
    """The calls of one region: observed, replayed, or eager with a counted reason."""

    def __init__(self, region: Region, modules: Sequence[tuple[str, nn.Module]], session: GraphSession) -> None:
        self.region = region
        self.observer: PlanObserver | None = None
        self._modules = modules
        self._attributes: Attributes | None = None
        self._why_not = "not captured yet"
        self._device_type = session.device.type
        self._stats: RegionStats = session.stats(region.name, region.kind)
        self._pairs: Sequence[GraphPair] = ()
        self._guard: PlanGuard | None = None
        self._busy: set[int] = set()

    def use(self, pairs: Sequence[GraphPair], guard: PlanGuard) -> None:
        """Replay ``pairs``, one a slot, in an order that ``guard`` allows."""
        self._pairs, self._guard = pairs, guard
        self._attributes = Attributes(self._modules)
        self._why_not = "" if pairs else "no gradient in the first step"
        for pair in pairs:
            pair.is_held()

    def forget(self) -> None:
        """Let go of the pairs and run eagerly."""
        self.observer, self._pairs, self._why_not = None, (), "closed"

    def start_step(self) -> None:
        """Look whether the attributes of the modules are as captured."""
        changed = self._attributes.changed() if self._attributes is not None else []
        if self._pairs:
            self._why_not = f"attribute {changed[0]} changed after the capture" if changed else ""

    def __call__(self, carried: Carried, context: Carried) -> Carried:
        """Run the region on its arguments."""
        if not torch.is_grad_enabled():
            return self._eager(carried, context, "evaluation")
        if autograd_private.saved_tensors_are_taken():
            # Recompute and offloading work on what autograd saves; a replay saves nothing.
            return self._eager(carried, context, "recompute or offloading of saved tensors")
        signature = Signature.of((carried, context), device_type=self._device_type, modules=self.region.modules)
        if self.observer is not None:
            return self._observed(self.observer, signature, carried, context)
        slot = lowest_free(self._busy)
        reason = self._why_not or self._why_eager(slot, signature, (*carried, *context))
        if not reason and self._guard is not None:
            reason = self._guard.why_not(self.region, slot)
        if reason or self._guard is None:
            return self._eager(carried, context, reason)
        self._guard.enter(Event(self.region, slot, Phase.FORWARD))
        pair = self._pairs[slot]
        result: Carried = pair.replay((*carried, *context), _Lease(self.region, slot, self._busy, self._guard, pair))
        return result

    def _why_eager(self, slot: int, signature: Signature, tensors: Sequence[Tensor]) -> str:
        """The reason why no captured pair serves a call; empty if one does."""
        if slot >= len(self._pairs):
            return "more microbatches in flight than at capture"
        pair = self._pairs[slot]
        if signature != pair.signature:
            return "evaluation" if signature.training != pair.signature.training else "another signature"
        if pair.moved_inputs(tensors):
            return "an argument that the model owns has moved"
        if pair.is_held():
            return "an earlier result is still held"
        return pair.why_not(tensors)

    def _eager(self, carried: Carried, context: Carried, reason: str) -> Carried:
        self._stats.eager_calls[reason] += 1
        result: Carried = self.region.function(carried, context)
        return result

    def _observed(self, observer: PlanObserver, signature: Signature, carried: Carried, context: Carried) -> Carried:
        slot = observer.forward(self.region, signature, [*carried, *context])
        result = self._eager(carried, context, "observed")
        observer.outputs(self.region, slot, result)
        differentiable = [tensor for tensor in result if tensor.requires_grad]
        call = _ObservedCall(observer, self.region, slot)
        if differentiable:
            torch.autograd.graph.register_multi_grad_hook(differentiable, call.backward_begins, mode="any")
        return result


class _ObservedCall:
    """Lives in the autograd graph of one observed forward: tells when its backward begins, or that none will come."""

    def __init__(self, observer: PlanObserver, region: Region, slot: int) -> None:
        self._observer, self._region, self._slot = observer, region, slot
        self._is_open = True

    def backward_begins(self, _gradient: Tensor) -> None:
        if self._is_open:
            self._is_open = False
            self._observer.backward(self._region, self._slot, autograd_private.backward_pass())

    def __del__(self) -> None:
        if self._is_open:
            self._observer.dropped(self._region, self._slot)


class _Lease:
    """A slot from its forward until its backward, or until autograd drops the result."""

    def __init__(self, region: Region, slot: int, busy: set[int], guard: PlanGuard, pair: GraphPair) -> None:
        self._region, self._slot, self._busy, self._guard, self._pair = region, slot, busy, guard, pair
        self._is_open = pair.is_in_flight = True
        busy.add(slot)
        guard.started(region, slot)

    def backward_begins(self) -> None:
        """Check the order of backwards, and that this one has not run before."""
        self._guard.enter(Event(self._region, self._slot, Phase.BACKWARD))

    def close(self) -> None:
        """Give the slot back. May be called twice."""
        if self._is_open:
            self._is_open = self._pair.is_in_flight = False
            self._busy.discard(self._slot)
            self._guard.finished(self._region, self._slot)

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

    inside = {id(m): m for segment in segments for owner in segment.modules for m in owner.modules()}
    modules = {id(layer): layer, **inside}  # The layer's own flags and attributes matter to its segments.
    return Region(
        name=path if is_whole else f"{path}.{parts}",
        kind="layer" if is_whole else kinds,
        function=run,
        modules=tuple(modules.values()),
    )


def _slot(item: tuple[tuple[Region, int], Any]) -> int:
    return item[0][1]
