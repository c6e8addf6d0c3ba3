"""The modules of a model, each with what of it is captured and why the rest is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from torch import nn

from graphstep.models.segments import SegmentedModule

WHOLE_MODEL: Final = "the whole model"
"""What a region with the empty path is called."""
_WHOLE_STEP: Final = ("iteration", "block")
"""Kinds of regions that contain every module."""
_PART: Final = "part"
_OUTSIDE: Final = "no graph was asked for here"
_ELSEWHERE: Final = "not known: the regions are named by no path of this model"
"""Graphs were attached to a part of the model, or to a list of callables."""


class Coverage(StrEnum):
    """How much of a module runs in graphs."""

    captured = "captured"
    partly = "partly"
    eager = "eager"


@dataclass(slots=True)
class ModuleNode:
    """One module, or a part of a layer that is no module."""

    path: str
    name: str
    """Its last step of the path; the class of the model at the top."""
    kind: str
    """Class of the module; ``part`` for a part of a layer that is none."""
    num_parameters: int = 0
    """Of the module and all below it; 0 where no model was given."""
    coverage: Coverage = Coverage.eager
    why: str = ""
    """Which graph has it, or why none does; of one that is partly captured, how much of it is."""
    region: Mapping[str, Any] | None = None
    """The region of this path, as the report has it."""
    children: list[ModuleNode] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "path": self.path,
            "name": self.name,
            "kind": self.kind,
            "num_parameters": self.num_parameters,
            "coverage": self.coverage.value,
            "why": self.why,
            "region": dict(self.region) if self.region is not None else None,
            "children": [child.to_json() for child in self.children],
        }

    def innermost(self) -> list[ModuleNode]:
        """Modules without modules in them; parts of layers only where no module is known."""
        leaves = [node for node in self.walk() if not node.children]
        return [node for node in leaves if node.kind != _PART] or leaves

    def walk(self) -> Iterator[ModuleNode]:
        """It and all below it, in the order of the model."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True, slots=True)
class _Claim:
    """What is known of a path and all below it."""

    coverage: Coverage
    why: str


def module_tree(report: Mapping[str, Any], model: nn.Module | None = None) -> ModuleNode:
    """Colour the modules of a model by what a report says.

    Args:
        report: a report as plain data, see :meth:`graphstep.CaptureReport.to_json`.
        model: what the regions belong to; without it the tree has the paths that the report names.
    """
    root, nodes = _nodes_of(model)
    owned = _owned_paths(model)
    claims: dict[str, _Claim] = {}
    is_elsewhere = model is not None and _is_elsewhere(report, nodes, owned)
    for region in report["regions"]:
        if region["kind"] in _WHOLE_STEP:
            continue
        claim = _claim_of(region)
        covered = _covered_paths(region["name"], nodes)
        for path in covered:
            claims[path] = claim
            _made(nodes, root, path).region = region
        for path in (each for part in covered for each in owned.get(part, ())):
            claims.setdefault(path, claim)
    for part in report["eager_parts"]:
        _made(nodes, root, part["name"])
        for path in (part["name"], *owned.get(part["name"], ())):
            claims.setdefault(path, _Claim(Coverage.eager, part["why"]))
    for path, first in _other_places(model):
        if first in claims:
            claims.setdefault(path, claims[first])
    whole = [region for region in report["regions"] if region["kind"] in _WHOLE_STEP]
    has_parts = any(map(_is_part, report["regions"]))
    outside = _Claim(Coverage.eager, _ELSEWHERE if is_elsewhere else _OUTSIDE)
    if whole and not has_parts:
        outside = _whole_claim(whole)
    elif not report["regions"]:
        outside = _Claim(Coverage.eager, "nothing was captured")
    _colour(root, claims, outside)
    return root


def _nodes_of(model: nn.Module | None) -> tuple[ModuleNode, dict[str, ModuleNode]]:
    root = ModuleNode("", type(model).__name__ if model is not None else "model", "model")
    nodes = {"": root}
    if model is None:
        return root, nodes
    root.kind = type(model).__name__
    # A module that stands in two places is shown in both.
    for path, module in model.named_modules(remove_duplicate=False):
        if path:
            node = nodes[path] = ModuleNode(path, path.rpartition(".")[2], type(module).__name__)
            nodes[path.rpartition(".")[0]].children.append(node)
        nodes[path].num_parameters = sum(parameter.numel() for parameter in module.parameters())
    return root, nodes


def _made(nodes: dict[str, ModuleNode], root: ModuleNode, path: str) -> ModuleNode:
    """The node of a path; made with all above it where the model has none."""
    found = nodes.get(path)
    if found is None:
        above, _, name = path.rpartition(".")
        parent = _made(nodes, root, above) if above else root
        found = nodes[path] = ModuleNode(path, name, _PART)
        parent.children.append(found)
    return found


def _covered_paths(region: str, nodes: Mapping[str, ModuleNode]) -> list[str]:
    """``layers.0.router+shared`` is the parts ``router`` and ``shared`` of ``layers.0``."""
    if region in nodes or "+" not in region:
        return [region]
    first, *others = region.split("+")
    layer = first.rpartition(".")[0]
    return [first, *(f"{layer}.{other}" if layer else other for other in others)]


def _is_part(region: Mapping[str, Any]) -> bool:
    """True if it lies in the model, at the path that it is named after."""
    return region["kind"] not in (*_WHOLE_STEP, "optimizer")


def _is_elsewhere(report: Mapping[str, Any], nodes: Mapping[str, ModuleNode], owned: Mapping[str, Any]) -> bool:
    """True if there are regions, and none lies in this model."""
    paths = [path for region in filter(_is_part, report["regions"]) for path in _covered_paths(region["name"], nodes)]
    inner = nodes.keys() - {""}
    return bool(paths) and not any(path in nodes or path in owned or path.rpartition(".")[0] in inner for path in paths)


def _owned_paths(model: nn.Module | None) -> dict[str, list[str]]:
    """For each part of a layer the modules that belong to it besides the one that it is named after: norms."""
    if model is None:
        return {}
    paths = {id(module): path for path, module in model.named_modules()}
    return {
        f"{path}.{segment.name}" if path else segment.name: [
            paths[id(owner)] for owner in segment.modules if id(owner) in paths
        ]
        for path, module in model.named_modules()
        if isinstance(module, SegmentedModule)
        for segment in module.segments()
    }


def _other_places(model: nn.Module | None) -> Iterator[tuple[str, str]]:
    """Paths of modules that stand in a place before it too, each with the first: calls in both are of one region."""
    if model is None:
        return
    first: dict[int, str] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if first.setdefault(id(module), path) != path:
            yield path, first[id(module)]


def _claim_of(region: Mapping[str, Any]) -> _Claim:
    if region["is_captured"]:
        misses = _eager_calls(region)
        text = f"in the graphs of {region['name'] or WHOLE_MODEL}"
        return _Claim(Coverage.captured, f"{text}; eager: {misses}" if misses else text)
    reasons = region["why_not_captured"] or _eager_calls(region) or "not called yet"
    return _Claim(Coverage.eager, reasons)


def _whole_claim(regions: Sequence[Mapping[str, Any]]) -> _Claim:
    captured = [region["name"] for region in regions if region["is_captured"]]
    eager = [region for region in regions if not region["is_captured"]]
    others = [f"{region['name']} is eager: {_claim_of(region).why}" for region in eager]
    if not captured:
        return _Claim(Coverage.eager, "; ".join(others))
    # Training that never got past its warmup, beside a graph of validation, is no captured step.
    state = Coverage.partly if any(region["eager_calls"] for region in eager) else Coverage.captured
    return _Claim(state, "; ".join([f"in the graph of the whole step: {', '.join(captured)}", *others]))


def _eager_calls(region: Mapping[str, Any]) -> str:
    calls = ", ".join(f"{count} {reason}" for reason, count in region["eager_calls"].items())
    last = "; ".join(filter(None, [*region["last_mismatch"], region["last_detail"]]))
    return f"{calls} (last: {last})" if last else calls


def _colour(node: ModuleNode, claims: Mapping[str, _Claim], inherited: _Claim) -> None:
    claim = claims.get(node.path, inherited)
    for child in node.children:
        _colour(child, claims, claim)
    node.coverage, node.why = claim.coverage, claim.why
    states = {child.coverage for child in node.children}
    if not states:
        return
    if states == {Coverage.captured}:
        node.coverage = Coverage.captured
        node.why = claim.why if claim.coverage is Coverage.captured else "all that is in it is captured"
    elif states != {claim.coverage}:
        node.coverage = Coverage.partly
        leaves = node.innermost()
        num_captured = sum(each.coverage is Coverage.captured for each in leaves)
        node.why = f"{num_captured} of the {len(leaves)} innermost modules in it are captured"
