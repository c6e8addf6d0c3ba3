"""Layers of hybrid models that are one part of a transformer layer: attention alone, MLP alone."""

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


class AttentionLayer(SegmentedModule):
    """x + dropout(attention(norm(x))).

    Parameters are allocated, not filled: `graphstep.models.initialize_weights` fills them.
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

    def segments(self) -> tuple[Segment, ...]:
        """Give the one segment (kind ``attn``), which takes ``(hidden_BSH, *context)``."""
        modules = (self.attention_norm, self.attention)
        return (Segment(CudaGraphModule.attn.value, "attention", self._attend, modules),)

    def _attend(self, hidden_BSH: Tensor, *context: Tensor) -> Tensor:
        update_BSH = self.attention(self.attention_norm(hidden_BSH), *context)
        return _add(hidden_BSH, update_BSH, self.hidden_dropout if self.training else 0.0)


class MLPLayer(SegmentedModule):
    """x + dropout(mlp(norm(x))).

    Parameters are allocated, not filled: `graphstep.models.initialize_weights` fills them.
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
        self.mlp_norm = build_norm(config, device=device, dtype=dtype)
        self.mlp = MLP(config, fp8=fp8, device=device, dtype=dtype)

    def segments(self) -> tuple[Segment, ...]:
        """Give the one segment (kind ``mlp``): it takes ``(hidden_BSH, *context)`` and ignores the context."""
        return (Segment(CudaGraphModule.mlp.value, "mlp", self._transform, (self.mlp_norm, self.mlp)),)

    def _transform(self, hidden_BSH: Tensor, *_context: Tensor) -> Tensor:
        update_BSH = self.mlp(self.mlp_norm(hidden_BSH))
        return _add(hidden_BSH, update_BSH, self.hidden_dropout if self.training else 0.0)


def _add(hidden_BSH: Tensor, update_BSH: Tensor, dropout: float) -> Tensor:
    return hidden_BSH + (functional.dropout(update_BSH, dropout) if dropout > 0.0 else update_BSH)
