"""The transformer layer: an attention segment, then an MLP segment, each with its residual connection."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from graphstep.config.model import ModelConfig
from graphstep.config.switches import CudaGraphModule
from graphstep.models.attention import Attention
from graphstep.models.delayed_scaling import DelayedScaling
from graphstep.models.mlp import MLP
from graphstep.models.norms import build_norm
from graphstep.models.segments import Segment, SegmentedModule


class TransformerLayer(SegmentedModule):
    """x = x + dropout(attention(norm(x))), then x = x + dropout(mlp(norm(x))).

    Parameters are allocated, not filled: `graphstep.models.initialize_weights` fills them.

    Source: Vaswani et al. 2017, section 3.1, with the normalisation in front as in Radford et al. 2019, section 2.3
    (studied by Xiong et al. 2020, "On Layer Normalization in the Transformer Architecture").
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        fp8: DelayedScaling | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_dropout = config.hidden_dropout
        self.attention_norm = build_norm(config, device=device, dtype=dtype)
        self.attention = Attention(config, fp8=fp8, device=device, dtype=dtype)
        self.mlp_norm = build_norm(config, device=device, dtype=dtype)
        self.mlp = MLP(config, fp8=fp8, device=device, dtype=dtype)

    def segments(self) -> tuple[Segment, ...]:
        """Give the attention segment (kind ``attn``) and the MLP segment (kind ``mlp``).

        Both take ``(hidden_BSH, *context)``, the context being ``(rope_cos_SD, rope_sin_SD)`` with rotary embedding
        and empty otherwise, and return the new hidden_BSH.
        """
        return (
            Segment(CudaGraphModule.attn.value, "attention", self._attend, (self.attention_norm, self.attention)),
            Segment(CudaGraphModule.mlp.value, "mlp", self._transform, (self.mlp_norm, self.mlp)),
        )

    def _attend(self, hidden_BSH: Tensor, *context: Tensor) -> Tensor:
        return self._add(hidden_BSH, self.attention(self.attention_norm(hidden_BSH), *context))

    def _transform(self, hidden_BSH: Tensor, *_context: Tensor) -> Tensor:
        return self._add(hidden_BSH, self.mlp(self.mlp_norm(hidden_BSH)))

    def _add(self, hidden_BSH: Tensor, update_BSH: Tensor) -> Tensor:
        if self.training and self.hidden_dropout > 0.0:
            update_BSH = functional.dropout(update_BSH, self.hidden_dropout)
        return hidden_BSH + update_BSH
