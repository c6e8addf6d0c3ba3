"""Parts of layers that nobody asked to capture: they are eager, and a report says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from graphstep.capture.report import EagerPart
from graphstep.config import CudaGraphModule
from graphstep.errors import Problem
from graphstep.models.segments import SegmentedModule

_ROUTER = frozenset({CudaGraphModule.moe_router, CudaGraphModule.moe_preprocess})


def eager_parts(model: nn.Module, modules: Sequence[CudaGraphModule]) -> tuple[EagerPart, ...]:
    """Of all layers of a model, in order; none if whole layers are captured."""
    return tuple(_eager_parts(model, modules))


def _eager_parts(model: nn.Module, modules: Sequence[CudaGraphModule]) -> Iterator[EagerPart]:
    names = [module.value for module in modules]
    for path, layer in model.named_modules():
        segments = layer.segments() if isinstance(layer, SegmentedModule) else ()
        for segment in segments:
            if segment.is_captured_by(names):
                continue
            kinds = " or ".join(dict.fromkeys(filter(None, (segment.kind, segment.part_of))))
            why = f"{kinds} is not among the modules {' '.join(names)}" if kinds else "it is never captured by name"
            yield EagerPart(".".join(filter(None, (path, segment.name))), segment.kind, why)


def in_no_layer(model: nn.Module, modules: Sequence[CudaGraphModule]) -> Problem | None:
    """What was named and is a part of no layer; of router and preprocess, which complete each other, one is enough."""
    segments = [s for layer in model.modules() if isinstance(layer, SegmentedModule) for s in layer.segments()]
    known = {kind for segment in segments for kind in (segment.kind, segment.part_of) if kind}
    missing = [module for module in modules if module.value not in known]
    if set(modules) >= _ROUTER and not set(missing) >= _ROUTER:
        missing = [module for module in missing if module not in _ROUTER]
    if not missing:
        return None
    names = ", ".join(missing)
    return Problem(
        code="module-in-no-layer",
        what=f"graphs of {names} were asked for, and no layer of {type(model).__name__} has such a part",
        where="--cuda-graph-modules",
        fix=f"leave {names} out; the parts are: {', '.join(sorted(known))}",
    )
