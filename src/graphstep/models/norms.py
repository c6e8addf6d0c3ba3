"""Normalisation over the hidden dimension, each one fused operator of PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphstep.config.model import ModelConfig
from graphstep.models.initialization import WeightInitializer


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, over the last dimension, statistics in float32.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4.
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))

    def init_weights(self, initializer: WeightInitializer) -> None:
        """Start as the plain normalisation: ones."""
        nn.init.ones_(self.weight)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Normalise [..., H]; the result has the same shape and dtype."""
        return functional.rms_norm(x_BSH, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.Module):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the last dimension, statistics in float32.

    Source: Ba, Kiros and Hinton 2016, "Layer Normalization", equation 4 (per token instead of per time step).
    """

    def __init__(
        self,
        hidden_size: int,
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))

    def init_weights(self, initializer: WeightInitializer) -> None:
        """Start as the plain normalisation: weight one, bias zero."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Normalise [..., H]; the result has the same shape and dtype."""
        return functional.layer_norm(x_BSH, self.weight.shape, self.weight, self.bias, self.eps)


def build_norm(
    config: ModelConfig,
    *,
    size: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> RMSNorm | LayerNorm:
    """Build the normalisation that ``config.normalization`` names, over ``size`` or ``config.hidden_size`` numbers."""
    kind = RMSNorm if config.normalization == "RMSNorm" else LayerNorm
    return kind(size or config.hidden_size, eps=config.norm_epsilon, device=device, dtype=dtype)
