"""What could be captured: the parts of a model, and sets of them that the switches can name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from torch import nn

from graphstep.models.segments import SegmentedModule
from graphstep.planning.scopes import ITERATION, OPTIMIZER, OUTSIDE

_ROUTER: Final = ("moe_router", "moe_preprocess")
_MOST_CHILDREN: Final = 6


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a layer, or a whole one, that can be told apart from the rest of a step."""

    path: str
    layer: str
    """Path of the layer that it belongs to."""
    kind: str = ""
    """What the switches call it: ``attn``; empty for a part that they cannot name."""
    part_of: str = ""
    """Kind of the wider part whose name means it as well."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A set of parts that one choice of switches captures."""

    name: str
    graph_of: Callable[[str], str | None] = field(repr=False, compare=False)
    """For a scope, what captured neighbours must share to be launched as one graph; None: it stays eager."""
    switches: tuple[str, ...] = ()
    """Words for the command line of ``graphstep train``; none where the model is not one of its."""
    regions: Mapping[str, str] = field(default_factory=dict)
    """The argument of that name of :func:`graphstep.attach`; empty where something else captures it."""
    how: str = ""
    """The call that captures it, in words, where there are no switches."""
    is_iteration: bool = False
    """One graph for forward and backward, or more."""
    apart_if_random: Callable[[str], str | None] | None = field(default=None, repr=False, compare=False)
    """The same as ``graph_of`` for layers that draw random numbers: those are not launched ahead of their call."""
    problem: str = ""
    """Why it cannot be had; empty if it can, as far as the options tell."""


def settled(candidate: Candidate, random_scopes: Collection[str]) -> Candidate:
    """The candidate once it is known which parts draw random numbers."""
    layer_of = candidate.apart_if_random
    if layer_of is None:
        return candidate
    apart = {layer_of(scope) for scope in random_scopes}

    def graph_of(scope: str) -> str | None:
        layer = layer_of(scope)
        return layer if layer in apart else candidate.graph_of(scope)

    return replace(candidate, graph_of=graph_of, apart_if_random=None)


def parts_of(model: nn.Module) -> tuple[Part, ...]:
    """Segments of the layers that list theirs; else repeated modules and the modules in them."""
    segmented = [(path, module) for path, module in model.named_modules() if isinstance(module, SegmentedModule)]
    if segmented:
        return tuple(
            Part(f"{path}.{segment.name}" if path else segment.name, path, segment.kind, segment.part_of)
            for path, module in segmented
            for segment in module.segments()
        )
    found: list[Part] = []
    for layers in _repeated(model).values():
        for path, layer in layers:
            found.append(Part(path, path))
            children = [(name, child) for name, child in layer.named_children() if _has_forward(child)]
            found += [Part(f"{path}.{name}", path, name) for name, child in children if _has_parameters(child)]
    return tuple(found)


def candidates_of(model: nn.Module) -> tuple[Candidate, ...]:
    """What can be captured of a model: with the switches for a model of segments, else with patterns of paths."""
    parts = parts_of(model)
    if any(isinstance(module, SegmentedModule) for module in model.modules()):
        return (*_of_switches(parts), *_whole_steps())
    return (*_of_patterns(model, parts), *_whole_callables())


def _of_switches(parts: Sequence[Part]) -> tuple[Candidate, ...]:
    kinds = list(dict.fromkeys(kind for part in parts for kind in (part.kind, part.part_of) if kind))
    singles: list[tuple[str, ...]] = [(kind,) for kind in kinds if kind not in _ROUTER]
    if set(_ROUTER) <= set(kinds):
        singles.append(_ROUTER)
    sets = list(singles)
    usual = tuple(kind for kind in ("attn", "mamba", "mlp", *_ROUTER) if kind in kinds)
    if usual not in sets:
        sets.append(usual)
    local = ("--cuda-graph-impl", "local")
    layer_of = {part.path: part.layer for part in parts}
    found = [
        Candidate(
            name=" ".join(names),
            graph_of=_named(parts, names),
            switches=(*local, "--cuda-graph-modules", *names),
        )
        for names in sets
    ]
    found.append(Candidate(name="whole layers", graph_of=layer_of.get, switches=local))
    found.append(
        Candidate(
            name="whole layers, merged",
            graph_of=lambda scope: "layers" if scope in layer_of else None,
            apart_if_random=layer_of.get,
            switches=(*local, "--cuda-graph-merge-layers", "0"),
        )
    )
    return tuple(found)


def _named(parts: Sequence[Part], names: Sequence[str]) -> Callable[[str], str | None]:
    """Captured neighbours of a layer are one region; an eager part between them cuts."""
    regions: dict[str, str] = {}
    number, before = 0, ""
    for part in parts:
        is_captured = part.kind in names or part.part_of in names
        if not is_captured or part.layer != before:
            number += 1
        before = part.layer
        if is_captured:
            regions[part.path] = f"{part.layer} {number}"
    return regions.get


def _whole_steps() -> tuple[Candidate, ...]:
    switches = ("--cuda-graph-impl", "full_iteration", "--no-check-for-nan-in-loss-and-grad")
    return (
        Candidate(
            name="full_iteration",
            graph_of=lambda scope: ITERATION if scope not in (OUTSIDE, OPTIMIZER) else None,
            switches=switches,
            is_iteration=True,
        ),
        Candidate(
            name="full_iteration, optimizer",
            graph_of=lambda _: ITERATION,
            switches=(*switches, "--optimizer-cuda-graph"),
            is_iteration=True,
        ),
    )


def _of_patterns(model: nn.Module, parts: Sequence[Part]) -> tuple[Candidate, ...]:
    layers = list(dict.fromkeys(part.layer for part in parts))
    patterns = list(_repeated(model))
    found: list[Candidate] = []
    if not layers:
        return ()
    for name in list(dict.fromkeys(part.kind for part in parts if part.kind))[:_MOST_CHILDREN]:
        chosen = {part.path: part.path for part in parts if part.kind == name}
        regions = {f"{pattern}.{name}": name for pattern in patterns if _some(chosen, pattern)}
        found.append(Candidate(name=name, graph_of=chosen.get, regions=regions, how=_attach(regions)))
    inside = {part.path: part.layer for part in parts}
    regions = dict.fromkeys(patterns, "layer")
    found.append(Candidate(name="whole layers", graph_of=inside.get, regions=regions, how=_attach(regions)))
    return tuple(found)


def _whole_callables() -> tuple[Candidate, ...]:
    return (
        Candidate(
            name="forward and backward",
            graph_of=lambda scope: ITERATION if scope not in (OUTSIDE, OPTIMIZER) else None,
            how="graphstep.FullCudaGraphWrapper",
            is_iteration=True,
        ),
        Candidate(
            name="whole step",
            graph_of=lambda _: ITERATION,
            how="@graphstep.graph_step",
            is_iteration=True,
        ),
    )


def _repeated(model: nn.Module) -> dict[str, list[tuple[str, nn.Module]]]:
    """Modules that are repeated in a list, by path pattern; those inside of others' items are left out.

    A list of one class has one pattern. In a list of several, as of layers with a head behind them, each module that
    consists of others and has another of its class beside it is a pattern of its own.
    """
    found: dict[str, list[tuple[str, nn.Module]]] = {}
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        if any(path.startswith(f"{item}.") for items in found.values() for item, _ in items):
            continue
        items = [(f"{path}.{name}" if path else name, item) for name, item in module.named_children()]
        numbers = Counter(type(item) for _, item in items)
        if len(items) > 1 and len(numbers) == 1 and _has_parameters(items[0][1]):
            found[f"{path}.*" if path else "*"] = items
        elif len(numbers) > 1:
            repeated = [(name, item) for name, item in items if numbers[type(item)] > 1 and list(item.children())]
            found.update((name, [(name, item)]) for name, item in repeated if _has_parameters(item))
    return found


def _has_forward(module: nn.Module) -> bool:
    return not isinstance(module, nn.ModuleList | nn.ModuleDict)


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _some(paths: Mapping[str, str], pattern: str) -> bool:
    above = pattern.removesuffix("*") if pattern.endswith("*") else f"{pattern}."
    return any(path.startswith(above) for path in paths)


def _attach(regions: Mapping[str, str]) -> str:
    return f"graphstep.attach(model, regions={dict(regions)})"
