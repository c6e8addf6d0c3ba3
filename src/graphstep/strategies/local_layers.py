"""A layer whose segments are partly replaced by replays."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.plan import PlanGuard, PlanObserver
from graphstep.capture.region import Region
from graphstep.capture.session import GraphSession
from graphstep.config import CudaGraphModule
from graphstep.errors import ConfigError
from graphstep.models.segments import Segment, SegmentedModule
from graphstep.strategies.local_calls import Carried, RegionCalls
from graphstep.strategies.local_forward import InstalledForward, forward_problem


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
        forward_problem(paths[id(layer)], layer)
        for layer, graphed in zip(layers, found, strict=True)
        if graphed.regions
    ]
    if any(problems):
        raise ConfigError([problem for problem in problems if problem is not None])
    return tuple(layer for layer in found if layer.regions)


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

    def start_capture(self) -> None:
        """Run eagerly from now on, until :meth:`use`."""
        for calls in self.regions:
            calls.start_capture()

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
                carried = _as_carried(step.fn(*carried, *context))
        if len(carried) != 1:
            raise TypeError(
                f"the last segment of {type(self._layer).__name__} must return one tensor, got {len(carried)}"
            )
        return carried[0]


def _as_carried(result: Tensor | Carried) -> Carried:
    """A segment's result as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def _region(path: str, layer: SegmentedModule, segments: tuple[Segment, ...]) -> Region:
    is_whole = len(segments) == len(layer.segments())
    parts = "+".join(segment.name for segment in segments)
    kinds = "+".join(segment.kind for segment in segments)
    functions = tuple(segment.fn for segment in segments)

    def run(carried: Carried, context: Carried) -> Carried:
        for function in functions:
            carried = _as_carried(function(*carried, *context))
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
