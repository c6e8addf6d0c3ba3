"""What is wrong with a wish for local graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from graphstep.config import CudaGraphImpl, CudaGraphModule
from graphstep.errors import Problem
from graphstep.models.segments import SegmentedModule


def other_strategy(impl: CudaGraphImpl, wanted: CudaGraphImpl) -> Problem:
    """A configuration of another strategy was given to what modules own."""
    return Problem(
        code=f"impl-not-{wanted.value.replace('_', '-')}",
        what=f"these graphs of a model's modules are those of impl={wanted.value!r}, got {impl.value!r}",
        where="CudaGraphConfig.impl",
        fix=f"use impl={wanted.value!r} here, or build_strategy for the others",
    )


def modules_and_regions(regions: Mapping[str, str]) -> Problem:
    """Two ways of saying what is captured were used at once."""
    return Problem(
        code="modules-and-regions",
        what=f"modules= names parts of layers with segments, and regions= the modules {', '.join(regions)}",
        where="CudaGraphManager, argument regions",
        fix="use one of the two",
    )


def nothing_to_capture(model: nn.Module, modules: Sequence[CudaGraphModule]) -> Problem:
    """Nothing in a model is what was asked for."""
    layers = [module for module in model.modules() if isinstance(module, SegmentedModule)]
    segments = [segment for layer in layers for segment in layer.segments()]
    kinds = sorted({kind for segment in segments for kind in (segment.kind, segment.part_of) if kind})
    wanted = ", ".join(module.value for module in modules) or "whole layers"
    if kinds:
        fix = f"name some of: {', '.join(kinds)}"
    else:
        fix = (
            'name modules of your own, attach(model, regions={"layers.*": "layer"}), or use --cuda-graph-impl '
            "full_iteration or none"
        )
    return Problem(
        code="nothing-to-capture",
        what=f"graphs of {wanted} were asked for, but {type(model).__name__} has {len(layers)} layers "
        f"with the parts: {', '.join(kinds) or 'none'}",
        where="--cuda-graph-modules",
        fix=fix,
    )
