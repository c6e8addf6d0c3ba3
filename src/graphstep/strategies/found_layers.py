"""Regions of models whose layers were found by their structure, such as those of transformers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from torch import nn

from graphstep.capture.report import EagerPart
from graphstep.config import CudaGraphModule
from graphstep.errors import ConfigError, Problem
from graphstep.hugging_face.structure import FoundLayer, Part, find_layers, is_hugging_face, why_not_static
from graphstep.hugging_face.unused_cache import UnusedCache
from graphstep.native.interface import FastPath
from graphstep.strategies.cut_layers import CutLayer
from graphstep.strategies.local_forward import forward_problem
from graphstep.strategies.local_layers import GraphedModule, MakeCalls

_MOE_PARTS = frozenset({CudaGraphModule.moe_router, CudaGraphModule.moe_preprocess})


def found_layers(
    model: nn.Module, modules: Sequence[CudaGraphModule], make_calls: MakeCalls, *, is_required: bool
) -> tuple[tuple[GraphedModule, ...], tuple[EagerPart, ...]]:
    """The layers of a model of transformers that have something to capture, and what in them stays eager.

    Without ``modules``, layers are captured whole, but for experts.

    Raises:
        ConfigError: a named part is in no layer, experts cannot be inside of a graph, or a layer is captured already.
    """
    layers = find_layers(model) if is_hugging_face(model) else ()
    problems = [*_missing(model, layers, modules)] if layers else []
    problems += [p for p in (forward_problem(each.path, each.module, by_segments=False) for each in layers) if p]
    if CudaGraphModule.moe in modules:
        problems += [problem for layer in layers for problem in _not_static(layer)][:1]
    if problems:
        raise ConfigError(problems)
    paths = {id(module): path for path, module in model.named_modules()}
    watches = _cache_watches(model, layers)
    graphed: list[GraphedModule] = []
    eager: list[EagerPart] = []
    for layer in layers:
        holes, kinds = _chosen(layer, modules)
        eager += [_eager_part(layer, hole, modules) for hole in holes]
        if kinds:
            watch = watches.get(_owner_path(layer))
            graphed.append(CutLayer(paths, layer, holes, kinds, make_calls, cache=watch, is_required=is_required))
    return (*graphed, *(map(CacheWatch, watches.values()) if graphed else ())), tuple(eager)


def _chosen(layer: FoundLayer, modules: Sequence[CudaGraphModule]) -> tuple[list[Part], list[CudaGraphModule]]:
    """What stays eager of a layer, and the kinds of what is captured."""
    holes: list[Part] = []
    kinds: list[CudaGraphModule] = []
    for part in layer.parts:
        if part.kind is not CudaGraphModule.moe:
            is_captured = not modules or part.kind in modules
            (kinds if is_captured else holes).append(part.kind if is_captured else part)  # type: ignore[arg-type]
        elif CudaGraphModule.moe in modules:
            kinds.append(part.kind)
        elif layer.experts is not None and (not modules or _MOE_PARTS & set(modules)):
            holes.append(layer.experts)
            kinds.append(CudaGraphModule.moe_router)
        else:
            holes.append(part)
    return holes, kinds


def _eager_part(layer: FoundLayer, hole: Part, modules: Sequence[CudaGraphModule]) -> EagerPart:
    name = f"{layer.path}.{hole.path}"
    if hole is layer.experts:
        return EagerPart(name, "experts", "experts run eagerly between graphs unless modules= names moe")
    if not modules:
        return EagerPart(
            name, hole.kind, "its experts are no module of their own, so that it can only be eager as a whole"
        )
    return EagerPart(name, hole.kind, f"{hole.kind} is not among the modules {' '.join(modules)}")


def _missing(model: nn.Module, layers: Sequence[FoundLayer], modules: Sequence[CudaGraphModule]) -> list[Problem]:
    known = {kind for layer in layers for kind in layer.kinds}
    names = ", ".join(module for module in modules if module not in known)
    if not names:
        return []
    return [
        Problem(
            code="module-in-no-layer",
            what=f"graphs of {names} were asked for, and no layer of {type(model).__name__} has such a part",
            where="--cuda-graph-modules",
            fix=f"leave {names} out; the parts are: {', '.join(sorted(known))}",
        )
    ]


def _not_static(layer: FoundLayer) -> list[Problem]:
    found = []
    for part in layer.parts:
        reason = None
        if part.kind is CudaGraphModule.moe:
            experts = layer.experts.module if layer.experts is not None else _list_in(part.module)
            reason = why_not_static(experts)
        if reason is not None:
            what, fix = reason
            path = f"{layer.path}.{part.path}"
            found.append(Problem("experts-on-the-host", f"{path} cannot be captured: {what}", path, fix))
    return found


def _list_in(module: nn.Module) -> nn.Module:
    return next((m for m in module.modules() if isinstance(m, nn.ModuleList)), module)


def _owner_path(layer: FoundLayer) -> str:
    """Path of the module that has the list with the layer."""
    return ".".join(layer.path.split(".")[:-2])


def _cache_watches(model: nn.Module, layers: Sequence[FoundLayer]) -> dict[str, UnusedCache]:
    """One for each module that runs layers and can make a cache for them, by its path."""
    known = dict(model.named_modules())
    owners = {path: known[path] for path in map(_owner_path, layers)}
    return {
        path: UnusedCache(owner)
        for path, owner in owners.items()
        if "use_cache" in inspect.signature(type(owner).forward).parameters
    }


class CacheWatch(GraphedModule):
    """Sees to it that layers get no cache that nobody reads, while they are captured."""

    def __init__(self, watch: UnusedCache) -> None:
        self.module = watch.module
        self._watch = watch

    @property
    def regions(self) -> tuple[()]:
        """None."""
        return ()

    def install(self) -> None:
        """Begin to watch."""
        self._watch.install()

    def use(self, fast: FastPath) -> None:
        """There is nothing to call."""

    def remove(self) -> None:
        """Watch no more. May be called twice."""
        self._watch.remove()
