"""Models of the package's own layers with experts, for training loops of tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tests.models.tiny import seeded
from tests.strategies.models import VOCABULARY

from graphstep.config.layers import LayersConfig
from graphstep.config.mamba import MambaConfig
from graphstep.config.model import ModelConfig
from graphstep.config.moe import MoEConfig
from graphstep.models import GPTModel
from graphstep.models.moe import routers

WIDE = ModelConfig(
    num_layers=3,
    hidden_size=16,
    num_attention_heads=2,
    num_query_groups=2,
    kv_channels=8,
    ffn_hidden_size=24,
    seq_length=6,
    max_position_embeddings=8,
    vocab_size=VOCABULARY,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    swiglu=True,
    normalization="RMSNorm",
    position_embedding_type="rope",
    add_bias_linear=False,
    untie_embeddings_and_output_weights=True,
)
DROPLESS = MoEConfig(num_experts=4, moe_router_topk=2, moe_ffn_hidden_size=16, moe_grouped_gemm=True)
DISPATCH = {
    "dropless": DROPLESS,
    "one by one": replace(DROPLESS, moe_grouped_gemm=False),
    "drop": replace(DROPLESS, moe_expert_capacity_factor=0.75),
    "drop and pad": replace(
        DROPLESS,
        moe_expert_capacity_factor=1.0,
        moe_pad_expert_input_to_capacity=True,
        moe_token_dispatcher_type="alltoall",
    ),
}
SHARED: dict[str, dict[str, Any]] = {
    "no shared": {},
    "shared": {"moe_shared_expert_intermediate_size": 16, "moe_shared_expert_gate": True},
    "shared beside": {
        "moe_shared_expert_intermediate_size": 16,
        "moe_shared_expert_overlap": True,
        "moe_token_dispatcher_type": "alltoall",
    },
}
BALANCING: dict[str, dict[str, Any]] = {
    "none": {"moe_router_load_balancing_type": "none"},
    "aux_loss": {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01},
    "seq_aux_loss": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1},
    "global_aux_loss": {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1},
    "sinkhorn": {"moe_router_load_balancing_type": "sinkhorn"},
    "bias": {
        "moe_router_load_balancing_type": "none",
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_dtype": "fp32",
    },
}


MAMBA = MambaConfig(mamba_state_dim=8, mamba_head_dim=8, mamba_num_groups=2)


def experts_model(moe: MoEConfig = DROPLESS, letters: str = "EEE", config: ModelConfig = WIDE) -> GPTModel:
    """Layers by letter: E attention and experts, D dense; or a hybrid pattern: M, *, -, and e for experts alone."""
    config = replace(config, num_layers=len(letters))
    if set(letters) <= set("ED"):
        moe = replace(moe, moe_layer_freq=tuple(int(letter == "E") for letter in letters))
        return GPTModel(config, moe=moe, generator=seeded())
    layers = LayersConfig(hybrid_layer_pattern=letters.upper())
    return GPTModel(config, moe=moe if "e" in letters else None, layers=layers, mamba=MAMBA, generator=seeded())


def routed_model(favour: str, moe: MoEConfig = DROPLESS, letters: str = "EEE") -> GPTModel:
    """The biases of its experts decide: all tokens to the first ones, none to the last one, or all scores alike."""
    model = experts_model(replace(moe, **BALANCING["bias"]), letters)
    for router in routers(model):
        with torch.no_grad():
            assert router.expert_bias is not None
            if favour == "one":
                router.expert_bias.copy_(torch.tensor([100.0, 50.0, 0.0, -50.0]))
            elif favour == "never the last":
                router.expert_bias[-1] = -100.0
            else:
                router.weight.zero_()  # Ties.
    return model


def tied_model(tie: str, moe: MoEConfig = DROPLESS) -> GPTModel:
    """Two of three layers count together: they have one router, or counters in the same memory, or are one layer."""
    model = experts_model(moe, "EEE")
    first, second = routers(model)[:2]
    if tie == "layer":
        model.layers[1] = model.layers[0]
    elif tie == "router":
        model.layers[1].moe.router = first
    else:
        second._buffers.update(first._buffers)
    return model
