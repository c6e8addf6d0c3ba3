"""The shared expert: an MLP that every token passes, beside those the router chose."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphstep.config.model import ModelConfig
from graphstep.config.moe import MoEConfig
from graphstep.models.initialization import WeightInitializer
from graphstep.models.mlp import MLP


class SharedExperts(nn.Module):
    """``mlp(x)``, with ``moe_shared_expert_gate`` times ``sigmoid(x @ gate)``.

    Source: Dai et al. 2024, "DeepSeekMoE", section 3.2; the gate is that of Qwen1.5-MoE.
    """

    def __init__(
        self,
        config: ModelConfig,
        moe: MoEConfig,
        inner: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.mlp = MLP(replace(config, ffn_hidden_size=inner), device=device, dtype=dtype)
        self.gate: nn.Parameter | None = None
        if moe.moe_shared_expert_gate:
            self.gate = nn.Parameter(torch.empty(1, config.hidden_size, device=device, dtype=dtype))

    def init_weights(self, initializer: WeightInitializer) -> None:
        """Draw the weights of the gate."""
        if self.gate is not None:
            initializer.normal_(self.gate)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Transform normalised hidden states [..., H]."""
        update_BSH: Tensor = self.mlp(x_BSH)
        if self.gate is None:
            return update_BSH
        return update_BSH * torch.sigmoid(functional.linear(x_BSH, self.gate))
