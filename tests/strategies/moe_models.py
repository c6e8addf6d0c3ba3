"""Models of the package's own layers with experts, for training loops of tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from tests.models.tiny import seeded
from tests.strategies.models import VOCABULARY
from torch import Tensor, nn
from torch.nn import functional

from graphstep.config.model import ModelConfig
from graphstep.config.moe import MoEConfig
from graphstep.models import initialize_weights
from graphstep.models.auxiliary_losses import GradientScale, mark_loss
from graphstep.models.initialization import WeightInitializer
from graphstep.models.layer import TransformerLayer
from graphstep.models.moe import MoELayer, MoETransformerLayer
from graphstep.models.norms import build_norm

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
    position_embedding_type="none",
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


class ExpertsModel(nn.Module):
    """Layers by letter: E attention and experts, e experts alone, D a dense layer."""

    def __init__(self, moe: MoEConfig = DROPLESS, letters: str = "EEE", config: ModelConfig = WIDE) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.hidden_size)
        self.scale = GradientScale()
        made: dict[str, Callable[[], nn.Module]] = {
            "E": partial(MoETransformerLayer, config, moe, self.scale),
            "e": partial(MoELayer, config, moe, self.scale),
            "D": partial(TransformerLayer, config),
        }
        self.layers = nn.ModuleList(made[letter]() for letter in letters)
        self.norm = build_norm(config)
        self.head = nn.Linear(config.hidden_size, VOCABULARY, bias=False)
        for each in (*self.layers, self.norm, self.scale):
            initialize_weights(each, WeightInitializer(std=0.2, num_layers=len(letters), generator=seeded()))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return mark_loss(loss, self.scale)


class Routed(ExpertsModel):
    """The biases of its experts decide: all tokens to expert 0 and 1, to one and its neighbour, or all alike."""

    def __init__(self, favour: str, moe: MoEConfig = DROPLESS, letters: str = "EEE") -> None:
        super().__init__(replace(moe, **BALANCING["bias"]), letters)
        for layer in self.layers:
            router = layer.moe.router
            with torch.no_grad():
                if favour == "one":
                    router.expert_bias.copy_(torch.tensor([100.0, 50.0, 0.0, -50.0]))
                elif favour == "never the last":
                    router.expert_bias[-1] = -100.0
                else:
                    router.weight.zero_()  # Ties.
