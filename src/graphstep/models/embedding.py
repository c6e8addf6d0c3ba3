"""The input side of the model: token embedding, learned positions, dropout.

Shapes: B batch, S sequence, H hidden, V vocabulary, M positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphstep.config.model import ModelConfig
from graphstep.models.initialization import WeightInitializer


class Embedding(nn.Module):
    """Sum of a token's vector and, with learned positions, the vector of its place in the sequence.

    Positions are 0 to S - 1 for each sequence, so their vectors are the first rows of the weight: a view, no lookup.

    Source: Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training", equation 2.
    """

    weight: nn.Parameter  # [V, H]
    position_weight: nn.Parameter | None  # [M, H]

    def __init__(
        self, config: ModelConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.hidden_dropout = config.hidden_dropout
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, device=device, dtype=dtype))
        if config.position_embedding_type == "learned_absolute":
            shape = (config.max_position_embeddings, config.hidden_size)
            self.position_weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        else:
            self.register_parameter("position_weight", None)

    def init_weights(self, initializer: WeightInitializer) -> None:
        """Normal weights for tokens and positions."""
        initializer.normal_(self.weight)
        if self.position_weight is not None:
            initializer.normal_(self.position_weight)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Embed int64 tokens [B, S], S at most M with learned positions, as [B, S, H]."""
        hidden_BSH = functional.embedding(tokens_BS, self.weight)
        if self.position_weight is not None:
            position_SH: Tensor = self.position_weight
            if tokens_BS.shape[1] != position_SH.shape[0]:
                # Slicing also when S == M would cost two kernels in the backward (zeros, then a copy).
                position_SH = position_SH[: tokens_BS.shape[1]]
            hidden_BSH = hidden_BSH + position_SH
        if self.training and self.hidden_dropout > 0.0:
            hidden_BSH = functional.dropout(hidden_BSH, self.hidden_dropout)
        return hidden_BSH
