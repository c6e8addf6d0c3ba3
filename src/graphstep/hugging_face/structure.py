"""Which modules of a model are layers, and which of their parts are attention, MLP, experts, router or Mamba mixer.

Told by structure: a list of modules with norms beside attention, MLP or mixer; weights with one slice for each expert;
a matrix with one row for each expert. No names of classes.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from graphstep.config import CudaGraphModule

_OF_ATTENTION: Final = frozenset(
    {"attention_mask", "position_embeddings", "position_ids", "past_key_values", "cache", "layer_past", "cache_params"}
)
"""Arguments that a forward of attention has, and that of an MLP has not."""
_HOST_LOOP: Final = ("eager", "", None)
"""Implementations of experts that run them one after another."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a layer, and where it lies below the layer."""

    kind: CudaGraphModule
    path: str
    module: nn.Module


@dataclass(frozen=True, slots=True)
class FoundLayer:
    """A layer and its parts."""

    path: str
    module: nn.Module
    parts: tuple[Part, ...]
    experts: Part | None = None
    """The experts alone, if they are a module beside their router."""

    @property
    def kinds(self) -> frozenset[CudaGraphModule]:
        """What :class:`CudaGraphConfig` can name of it."""
        found = {part.kind for part in self.parts}
        if self.experts is not None:
            found |= {CudaGraphModule.moe_router, CudaGraphModule.moe_preprocess}
        return frozenset(found)


def is_hugging_face(model: nn.Module) -> bool:
    """True for models of transformers, also inside of wrappers: some module has a configuration with a model type."""
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(isinstance(getattr(config, "model_type", None), str) for config in configs)


def find_layers(model: nn.Module) -> tuple[FoundLayer, ...]:
    """The layers of a model, in the order of its modules; none inside of another."""
    found: list[FoundLayer] = []
    inside: set[int] = set()
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or id(module) in inside:
            continue
        layers = [_layer(f"{path}.{name}", layer) for name, layer in module.named_children()]
        known = [layer for layer in layers if layer is not None]
        if len(known) == len(layers):
            found += known
            inside |= {id(m) for layer in known for m in layer.module.modules()}
    return tuple(found)


def _layer(path: str, layer: nn.Module) -> FoundLayer | None:
    parts: list[Part] = []
    experts: Part | None = None
    has_norm = False
    for name, child in layer.named_children():
        has_norm = has_norm or _is_norm(child)
        kind = _kind(child)
        if kind is None:
            continue
        parts.append(Part(kind, name, child))
        below, module = _experts_in(child)
        if kind is CudaGraphModule.moe and child is not module:
            experts = Part(CudaGraphModule.moe, f"{name}.{below}", module) if not _is_list(module) else None
    has_mixing = any(part.kind in (CudaGraphModule.attn, CudaGraphModule.mamba) for part in parts)
    return FoundLayer(path, layer, tuple(parts), experts) if parts and (has_mixing or has_norm) else None


def _kind(module: nn.Module) -> CudaGraphModule | None:
    if _experts_in(module)[1] is not None:
        return CudaGraphModule.moe
    if _is_mixer(module):
        return CudaGraphModule.mamba
    matrices = sum(1 for parameter in module.parameters() if parameter.dim() == 2)
    if matrices < 2:
        return None
    if _argument_names(module) & _OF_ATTENTION:
        return CudaGraphModule.attn
    return CudaGraphModule.mlp


def _experts_in(module: nn.Module) -> tuple[str, Any]:
    """Path and module of the experts in a module, itself included, with wrappers around them; without the router."""
    for path, inner in module.named_modules():
        stacked = [p for p in inner._parameters.values() if p is not None and p.dim() == 3]
        number = stacked[0].shape[0] if len(stacked) >= 2 else 0
        if number and all(p.shape[0] == number for p in stacked):
            return _without_router(module, path, number)
        if _is_list(inner) and len(inner) > 1 and _are_alike(inner) and _has_rows(module, inner, len(inner)):
            return path, inner
    return "", None


def _without_router(module: nn.Module, path: str, number: int) -> tuple[str, nn.Module]:
    steps = path.split(".")
    for length in range(1, len(steps) + 1):
        prefix = ".".join(steps[:length])
        inner = module.get_submodule(prefix)
        if length == len(steps) or _has_rows(module, inner, number):
            return prefix, inner
    return path, module


def _is_list(module: Any) -> bool:
    return isinstance(module, nn.ModuleList)


def _are_alike(modules: nn.ModuleList) -> bool:
    shapes = [tuple(tuple(p.shape) for p in module.parameters()) for module in modules]
    return bool(shapes[0]) and len(set(shapes)) == 1


def _has_rows(module: nn.Module, experts: nn.Module, number: int) -> bool:
    """True if there is a router: a matrix with a row for each expert, outside of the experts."""
    own = {id(p) for p in experts.parameters()}
    return any(p.dim() == 2 and p.shape[0] == number and id(p) not in own for p in module.parameters())


def _is_mixer(module: nn.Module) -> bool:
    """A short convolution of each channel, and parameters for each head or channel."""
    vectors = sum(1 for p in module._parameters.values() if p is not None and p.dim() <= 2)
    return vectors >= 2 and any(isinstance(child, nn.Conv1d) for child in module.children())


def _is_norm(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and all(p.dim() <= 1 for p in parameters)


def _argument_names(module: nn.Module) -> set[str]:
    try:
        return set(inspect.signature(type(module).forward).parameters)
    except (TypeError, ValueError):
        return set()


def why_not_static(experts: nn.Module) -> tuple[str, str] | None:
    """Why experts cannot be inside of a graph, and what to do; ``None`` if nothing is known to be in the way."""
    if _is_list(experts):
        return (
            "its experts are a list of modules, each of which runs for as many rows as were routed to it: that number "
            "is read on the host",
            "leave moe out of the modules, so that the experts run eagerly between graphs",
        )
    configs = (getattr(module, "config", None) for module in experts.modules())
    told = [getattr(config, "_experts_implementation", "unknown") for config in configs if config is not None]
    implementation = told[0] if told else "unknown"
    if implementation in _HOST_LOOP:
        return (
            f"its experts run one after another in a loop on the host (experts_implementation={implementation!r}), "
            "each for as many rows as were routed to it",
            "call model.set_experts_implementation('grouped_mm') before, or leave moe out of the modules",
        )
    return None
