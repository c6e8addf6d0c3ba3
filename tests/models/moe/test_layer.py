from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.models.tiny import LLAMA, seeded
from torch import Tensor

from graphstep.config.model import ModelConfig
from graphstep.config.moe import MoEConfig
from graphstep.models import initialize_weights
from graphstep.models.auxiliary_losses import GradientScale
from graphstep.models.initialization import WeightInitializer
from graphstep.models.moe import MoELayer, MoETransformerLayer

MODEL = replace(LLAMA, position_embedding_type="none", num_query_groups=4)
MOE = MoEConfig(num_experts=8, moe_router_topk=2, moe_ffn_hidden_size=16, moe_grouped_gemm=True, moe_aux_loss_coeff=0.1)
SHARED: dict[str, Any] = {"moe_shared_expert_intermediate_size": 24}
MODES: dict[str, dict[str, Any]] = {
    "dropless": {},
    "sequential": {"moe_grouped_gemm": False},
    "drop": {"moe_expert_capacity_factor": 1.0},
    "pad": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
    "shared": SHARED,
    "overlap": {**SHARED, "moe_shared_expert_overlap": True, "moe_token_dispatcher_type": "alltoall"},
    "gate": {**SHARED, "moe_shared_expert_gate": True, "moe_token_dispatcher_type": "alltoall"},
}


def built(kind: type[MoELayer], moe: MoEConfig, config: ModelConfig = MODEL) -> MoELayer:
    layer = kind(config, moe, GradientScale())
    initialize_weights(layer, WeightInitializer(std=0.2, num_layers=1, generator=seeded()))
    return layer


@pytest.fixture
def hidden() -> Tensor:
    return torch.randn(2, 12, 32, requires_grad=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [MoELayer, MoETransformerLayer])
def test_a_layer_runs_forward_and_backward(kind: type[MoELayer], mode: str, hidden: Tensor) -> None:
    layer = built(kind, replace(MOE, **MODES[mode]))
    layer(hidden).square().mean().backward()
    assert hidden.grad is not None
    missing = [name for name, parameter in layer.named_parameters() if parameter.grad is None]
    assert missing == []
    assert all(bool(parameter.grad.isfinite().all()) for parameter in layer.parameters() if parameter.grad is not None)
