"""Modules whose forward is partly or wholly replaced by replays: layers of segments, and any others by path."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from graphstep.capture.region import Region
from graphstep.config import CudaGraphModule
from graphstep.errors import ConfigError, Problem
from graphstep.models.segments import Segment, SegmentedModule
from graphstep.native.interface import FastPath
from graphstep.strategies.local_calls import RegionCalls
from graphstep.strategies.local_forward import InstalledForward, forward_problem, own_forward

Carried = tuple[Tensor, ...]
Named = Sequence[tuple[str, nn.Module]]
MakeCalls = Callable[[Region, Named], RegionCalls]


class GraphedModule:
    """A module whose whole forward is one region."""

    def __init__(self, paths: Mapping[int, str], module: nn.Module, kind: str, make_calls: MakeCalls) -> None:
        self.module = module
        self._own = module.__dict__.get("forward")
        function = own_forward(module)
        inside = tuple(module.modules())
        region = Region(name=paths[id(module)], kind=kind, function=function, modules=inside)
        self._calls = make_calls(region, [(paths[id(m)], m) for m in inside])

    @property
    def regions(self) -> tuple[RegionCalls, ...]:
        """The one region."""
        return (self._calls,)

    @property
    def in_parts(self) -> tuple[nn.Module, ...]:
        """Modules inside of it whose forward is run in parts: none."""
        return ()

    def install(self) -> None:
        """Put the region in place of the module's forward, on the instance. Module hooks fire as before."""
        self.module.__dict__["forward"] = InstalledForward(self.module, self.forward, own_forward(self.module))

    def use(self, fast: FastPath) -> None:
        """Have the compiled part look at each call first."""
        calls = self._calls
        if calls.entry is None:
            calls.entry = fast.Call(calls.__call__, calls.resume, False)
            self._enter_by(calls.entry)

    def _enter_by(self, entry: Callable[..., Any]) -> None:
        installed = self.module.__dict__.get("forward")
        if isinstance(installed, InstalledForward) and installed.runs(self.forward):
            installed.enter_by(entry)

    def remove(self) -> None:
        """Put the module's own ``forward`` back. May be called twice."""
        installed = self.module.__dict__.get("forward")
        if isinstance(installed, InstalledForward) and installed.runs(self.forward):
            del self.module.__dict__["forward"]
            if self._own is not None:
                self.module.__dict__["forward"] = self._own

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """The module's forward: same arguments and results."""
        return self._calls(*arguments, **named)


class GraphedLayer(GraphedModule):
    """Runs a layer's segments: captured groups through their regions, the others as they are."""

    def __init__(
        self,
        paths: Mapping[int, str],
        layer: SegmentedModule,
        modules: frozenset[CudaGraphModule],
        make_calls: MakeCalls,
    ) -> None:
        self.module = layer
        self._own = layer.__dict__.get("forward")
        self._steps: list[RegionCalls | Segment] = []
        names = {module.value for module in modules}
        for is_captured, group in groupby(layer.segments(), key=lambda s: s.is_captured_by(names)):
            segments = tuple(group)
            if is_captured:
                region = _region(paths[id(layer)], layer, segments)
                held = {id(m): f"{paths[id(layer)]}.{name}" for name, m in _held(layer)}
                known = {**held, **paths}
                # One that nobody registers, such as the scale of losses in a layer by itself, has no path.
                named = [(known.get(id(m), f"{region.name}: {type(m).__name__}"), m) for m in region.modules]
                self._steps.append(make_calls(region, named))
            else:
                self._steps.extend(segments)

    @property
    def regions(self) -> tuple[RegionCalls, ...]:
        """The captured groups."""
        return tuple(step for step in self._steps if isinstance(step, RegionCalls))

    def use(self, fast: FastPath) -> None:
        """See the base: the layer itself is entered that way where it is one region, else each region."""
        is_whole = len(self._steps) == 1
        for calls in self.regions:
            if calls.entry is not None:
                continue
            fallback = self.forward if is_whole else calls.__call__
            calls.entry = fast.Call(fallback, calls.resume, is_whole)
            if is_whole:
                self._enter_by(calls.entry)

    def forward(self, hidden: Tensor, *context: Tensor) -> Tensor:
        """The layer's forward: same arguments and results."""
        carried: Carried = (hidden,)
        is_whole = len(self._steps) == 1  # Then the entry has called this.
        for step in self._steps:
            if isinstance(step, RegionCalls):
                call = step if step.entry is None or is_whole else step.entry
                carried = call(carried[0] if len(carried) == 1 else carried, *context)
            else:
                carried = _as_carried(step.fn(*carried, *context))
        if len(carried) != 1:
            raise TypeError(
                f"the last segment of {type(self.module).__name__} must return one tensor, got {len(carried)}"
            )
        return carried[0]


def graphed_layers(
    model: nn.Module, modules: frozenset[CudaGraphModule], make_calls: MakeCalls
) -> tuple[GraphedModule, ...]:
    """The layers of a model that have something to capture; empty ``modules`` means whole layers.

    Raises:
        ConfigError: names the layers that compute something else than their segments.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    layers = [layer for layer in model.modules() if isinstance(layer, SegmentedModule)]
    found = [GraphedLayer(paths, layer, modules, make_calls) for layer in layers]
    problems = [
        forward_problem(paths[id(layer)], layer)
        for layer, graphed in zip(layers, found, strict=True)
        if graphed.regions
    ]
    if any(problems):
        raise ConfigError([problem for problem in problems if problem is not None])
    return tuple(layer for layer in found if layer.regions)


def graphed_modules(model: nn.Module, regions: Mapping[str, str], make_calls: MakeCalls) -> tuple[GraphedModule, ...]:
    """The modules whose paths match a pattern; ``*`` matches within one step of a path.

    Raises:
        ConfigError: a pattern matches nothing, one region would lie in another, or a forward was replaced already.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    chosen: dict[int, tuple[nn.Module, str]] = {}
    problems: list[Problem] = []
    for pattern, kind in regions.items():
        matching = [
            module
            for module in model.modules()
            if _matches(paths[id(module)], pattern) and getattr(type(module), "forward", None) is not nn.Module.forward
        ]
        if not matching:
            problems.append(_no_match(model, pattern))
        for module in matching:
            chosen.setdefault(id(module), (module, kind))
    for module, _ in chosen.values():
        inner = [paths[id(m)] for m in module.modules() if m is not module and id(m) in chosen]
        if inner:
            problems.append(
                Problem(
                    "regions-overlap",
                    f"region {paths[id(module)]} contains the region {inner[0]}",
                    paths[id(module)],
                    "give patterns whose modules do not contain each other",
                )
            )
        replaced = forward_problem(paths[id(module)], module, by_segments=False)
        if replaced is not None:
            problems.append(replaced)
    if problems:
        raise ConfigError(problems)
    return tuple(GraphedModule(paths, module, kind, make_calls) for module, kind in chosen.values())


def _matches(path: str, pattern: str) -> bool:
    steps, wanted = path.split("."), pattern.split(".")
    return bool(path) == bool(pattern) and len(steps) == len(wanted) and all(map(fnmatchcase, steps, wanted))


def _no_match(model: nn.Module, pattern: str) -> Problem:
    known = [path for path, _ in model.named_modules() if path]
    near = [path for path in known if path.split(".")[-1] == pattern.rsplit(".", maxsplit=1)[-1]] or known
    return Problem(
        "region-not-found",
        f"no module of {type(model).__name__} that has a forward matches {pattern!r}",
        "regions",
        f"name paths of modules, such as {', '.join(near[:4])}",
    )


def _held(layer: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules that are plain attributes."""
    return [(name, value) for name, value in vars(layer).items() if isinstance(value, nn.Module)]


def _as_carried(result: Tensor | Carried) -> Carried:
    """A segment's result as a tuple."""
    return result if isinstance(result, tuple) else (result,)


def _region(path: str, layer: SegmentedModule, segments: tuple[Segment, ...]) -> Region:
    all_segments = layer.segments()
    is_whole = len(segments) == len(all_segments)
    parts = "+".join(segment.name for segment in segments)
    kinds = "+".join(segment.kind for segment in segments)
    functions = tuple(segment.fn for segment in segments)

    def run(given: Tensor | Carried, *context: Tensor) -> Carried:
        # One argument for all that is carried: so the call of the next layer has its arguments in the same places.
        carried = _as_carried(given)
        for function in functions:
            carried = _as_carried(function(*carried, *context))
        return carried

    inside = {id(m): m for segment in segments for owner in segment.modules for m in owner.modules()}
    # The layer's own flags and attributes matter to its segments, and those of modules that it holds unregistered: as
    # one of its attributes, the training flag of such a module would have to stay as it is at the capture.
    modules = {id(layer): layer, **inside, **{id(m): m for _, m in _held(layer)}}
    return Region(
        name=path if is_whole else f"{path}.{parts}",
        kind="layer" if is_whole else kinds,
        function=run,
        modules=tuple(modules.values()),
        is_rest=not is_whole and segments[-1].name == all_segments[-1].name,
    )
