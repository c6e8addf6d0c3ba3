"""The output side of the model: final norm, logits, and the loss.

Shapes: B batch, S sequence, H hidden, V vocabulary (padded).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphstep.config.model import ModelConfig
from graphstep.models.initialization import WeightInitializer
from graphstep.models.norms import build_norm
from graphstep.models.weight_gradients import AddsWeightGradients, linear


class OutputHead(AddsWeightGradients):
    """Final normalisation and projection to the vocabulary, without bias.

    A tied head owns no projection: it is handed the weight of the embedding, which so has one owner and one entry in
    the state dict.

    Source: Press and Wolf 2017, "Using the Output Embedding to Improve Language Models", section 3 (tied weights).
    """

    weight: nn.Parameter | None  # [V, H]

    def __init__(
        self, config: ModelConfig, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.norm = build_norm(config, device=device, dtype=dtype)
        if config.untie_embeddings_and_output_weights:
            shape = (config.vocab_size, config.hidden_size)
            self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        else:
            self.register_parameter("weight", None)

    def init_weights(self, initializer: WeightInitializer) -> None:
        """Normal weights, if the head owns any."""
        if self.weight is not None:
            initializer.normal_(self.weight)

    def forward(self, hidden_BSH: Tensor, embedding_weight_VH: Tensor) -> Tensor:
        """Project [B, S, H] to logits [B, S, V]; ``embedding_weight_VH`` is used only by a tied head."""
        weight_VH = embedding_weight_VH if self.weight is None else self.weight
        return linear(self.norm(hidden_BSH), weight_VH, None, self.weight_gradients)


def token_cross_entropy(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Mean over all tokens of -log softmax(logits)[label], computed in float32.

    Args:
        logits_BSV: any floating dtype; V may be padded beyond the true vocabulary. The padding takes part in the
            softmax as classes that never occur, and training pushes their probability to zero.
        labels_BS: int64, each below the true vocabulary size.

    Returns:
        Float32 scalar, in nats per token.

    Cost on CUDA, from 16-bit logits: three kernels forward, four backward; keeps one float32 copy of the logits' size.
    """
    return functional.cross_entropy(logits_BSV.flatten(0, 1).float(), labels_BS.flatten())
