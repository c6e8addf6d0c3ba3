"""Small blocks and layers with experts for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.models.tiny import LLAMA, seeded

from graphstep.config.model import ModelConfig
from graphstep.config.moe import MoEConfig
from graphstep.models import initialize_weights
from graphstep.models.auxiliary_losses import GradientScale
from graphstep.models.initialization import WeightInitializer
from graphstep.models.moe import MoEBlock, MoELayer, MoETransformerLayer

MODEL = replace(LLAMA, position_embedding_type="none", num_query_groups=4)
MOE = MoEConfig(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=16, moe_grouped_gemm=True)


def built_block(
    moe: MoEConfig = MOE, config: ModelConfig = MODEL, *, scale: GradientScale | None = None, **options: Any
) -> MoEBlock:
    block = MoEBlock(config, moe, scale or GradientScale(), **options)
    initialize_weights(block, WeightInitializer(std=0.2, num_layers=1, generator=seeded()))
    return block


def built_layer(
    moe: MoEConfig = MOE,
    config: ModelConfig = MODEL,
    *,
    kind: type[MoELayer] = MoETransformerLayer,
    scale: GradientScale | None = None,
    **options: Any,
) -> MoELayer:
    layer = kind(config, moe, scale or GradientScale(), **options)
    initialize_weights(layer, WeightInitializer(std=0.2, num_layers=1, generator=seeded()))
    return layer
