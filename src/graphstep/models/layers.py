"""Which layers a model has: attention and MLP or experts in each, or as a pattern says."""

from __future__ import annotations

from typing import Final

import torch

from graphstep.config.layer_freq import moe_layers, print_layer_freq
from graphstep.config.layer_pattern import pattern_layers
from graphstep.config.layers import LayersConfig
from graphstep.config.mamba import MambaConfig
from graphstep.config.model import ModelConfig
from graphstep.config.moe import MoEConfig
from graphstep.errors import ConfigError, Problem
from graphstep.models.auxiliary_losses import GradientScale
from graphstep.models.delayed_scaling import DelayedScaling
from graphstep.models.layer import TransformerLayer
from graphstep.models.mamba import MambaLayer
from graphstep.models.moe import MoELayer, MoETransformerLayer
from graphstep.models.part_layers import AttentionLayer, MLPLayer
from graphstep.models.segments import SegmentedModule

LETTERS: Final = "M*-E"
"""Mamba, attention, MLP, experts."""

_DENSE, _WITH_EXPERTS = "dense", "dense with experts"


def build_layers(
    config: ModelConfig,
    *,
    moe: MoEConfig | None = None,
    layers: LayersConfig | None = None,
    mamba: MambaConfig | None = None,
    scale: GradientScale | None = None,
    fp8: DelayedScaling | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> list[SegmentedModule]:
    """Return the layers of a model, in order, allocated and not filled.

    Args:
        config: sizes and choices; ``num_layers`` must be that of the pattern.
        moe: experts; None or ``num_experts`` of None: there are none.
        layers: ``hybrid_layer_pattern`` has one letter a layer: ``M`` Mamba, ``*`` attention, ``-`` MLP, ``E`` experts.
            Without one each layer is attention and MLP, or attention and experts where ``moe_layer_freq`` says so.
        mamba: sizes of Mamba layers; those of Megatron-LM if None.
        scale: what routers take the gradient of their losses from; a new one if None.
        fp8: recipe of the linear layers of attention and MLP; experts and Mamba layers multiply as they are.
        device: where the parameters live.
        dtype: of all parameters.

    Raises:
        ConfigError: the pattern, its length and the experts do not fit each other, all problems at once; or what a
            layer has against its sizes.
    """
    moe, mamba = moe or MoEConfig(), mamba or MambaConfig()
    scale = scale or GradientScale(device=device)
    kinds = _kinds(config, moe, layers or LayersConfig())

    def build(kind: str) -> SegmentedModule:
        if kind == _WITH_EXPERTS:
            return MoETransformerLayer(config, moe, scale, device=device, dtype=dtype)
        if kind == "E":
            return MoELayer(config, moe, scale, device=device, dtype=dtype)
        if kind == "M":
            return MambaLayer(config, mamba, device=device, dtype=dtype)
        plain = {_DENSE: TransformerLayer, "*": AttentionLayer, "-": MLPLayer}[kind]
        return plain(config, fp8=fp8, device=device, dtype=dtype)

    return [build(kind) for kind in kinds]


def _kinds(config: ModelConfig, moe: MoEConfig, layers: LayersConfig) -> list[str]:
    """Return the kind of each layer: a letter, or attention with MLP or experts.

    Raises:
        ConfigError: with all problems.
    """
    pattern = layers.hybrid_layer_pattern
    if pattern is None:
        freq = moe.moe_layer_freq if moe.num_experts is not None else (0,) * config.num_layers
        has_experts = moe_layers(freq, config.num_layers if isinstance(freq, int) else len(freq))
        kinds = [_WITH_EXPERTS if has else _DENSE for has in has_experts]
        where = f"ModelConfig.num_layers, MoEConfig.moe_layer_freq = {print_layer_freq(moe.moe_layer_freq)}"
    else:
        kinds = list(pattern_layers(pattern))
        where = f"ModelConfig.num_layers, LayersConfig.hybrid_layer_pattern = {pattern}"
    problems = []
    if len(kinds) != config.num_layers:
        what = f"the model has {config.num_layers} layers, and kinds are given for {len(kinds)}"
        problems.append(Problem("model-num-layers", what, where, f"set num_layers to {len(kinds)}"))
    unknown = sorted(set(pattern or "") - set(LETTERS))
    if unknown:
        what = f"there are no layers for {' '.join(unknown)} of the pattern {pattern}"
        fix = "use M for Mamba, * for attention, - for an MLP, E for experts"
        problems.append(Problem("model-layer-letter", what, "LayersConfig.hybrid_layer_pattern", fix))
    if "E" in kinds and moe.num_experts is None:
        what = f"the pattern {pattern} has layers with experts, and their number is not known"
        fix = "set num_experts, or leave E out of the pattern"
        problems.append(Problem("model-no-experts", what, "MoEConfig.num_experts", fix))
    has_any = _WITH_EXPERTS in kinds or "E" in kinds
    if has_any and moe.num_experts is not None and moe.moe_router_topk > moe.num_experts:
        what = f"a token cannot go to {moe.moe_router_topk} of {moe.num_experts} experts"
        problems.append(Problem("topk-exceeds-experts", what, "MoEConfig.moe_router_topk", "lower moe_router_topk"))
    if problems:
        raise ConfigError(problems)
    return kinds
