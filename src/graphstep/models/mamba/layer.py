"""The Mamba layer: one segment, with its residual connection."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from graphstep.config.mamba import MambaConfig
from graphstep.config.model import ModelConfig
from graphstep.config.switches import CudaGraphModule
from graphstep.models.mamba.mixer import CHUNK_SIZE, Mamba2
from graphstep.models.norms import build_norm
from graphstep.models.segments import Segment, SegmentedModule


class MambaLayer(SegmentedModule):
    """x + dropout(mixer(norm(x))).

    Parameters are allocated, not filled: `graphstep.models.initialize_weights` fills them.

    Source: Dao and Gu 2024, "Transformers are SSMs", section 7.
    """

    def __init__(
        self,
        config: ModelConfig,
        mamba: MambaConfig,
        *,
        chunk_size: int = CHUNK_SIZE,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.hidden_dropout = config.hidden_dropout
        self.mixer_norm = build_norm(config, device=device, dtype=dtype)
        self.mixer = Mamba2(config, mamba, chunk_size=chunk_size, device=device, dtype=dtype)

    def segments(self) -> tuple[Segment, ...]:
        """Give the one segment (kind ``mamba``): it takes ``(hidden_BSH, *context)`` and ignores the context."""
        return (Segment(CudaGraphModule.mamba.value, "mixer", self._mix, (self.mixer_norm, self.mixer)),)

    def _mix(self, hidden_BSH: Tensor, *_context: Tensor) -> Tensor:
        update_BSH: Tensor = self.mixer(self.mixer_norm(hidden_BSH))
        if self.training and self.hidden_dropout > 0.0:
            update_BSH = functional.dropout(update_BSH, self.hidden_dropout)
        return hidden_BSH + update_BSH
