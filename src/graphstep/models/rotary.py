"""Rotary position embedding: tables of cosines and sines, and the rotation of queries and keys.

Shapes: B batch, S sequence, N heads, D channels of a head, M positions in the tables.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from graphstep.config.model import ModelConfig
from graphstep.models.initialization import WeightInitializer


def rotary_channels(config: ModelConfig) -> int:
    """Number of leading channels of each head that rotate, even; 0 when the model has no rotary embedding."""
    if config.position_embedding_type != "rope":
        return 0
    return int(config.kv_channels * config.rotary_percent)


class RotaryTables(nn.Module):
    """cos(p * theta_i) and sin(p * theta_i) for every position p, theta_i = base^(-2i / rotary channels).

    Channel i rotates with channel i + rotary_channels / 2 (the layout of GPT-NeoX and Llama), so both halves of a
    table row hold the same angles. Channels that do not rotate have cosine 1 and sine 0: the rotation then needs no
    second code path and no copy for them. The tables are a buffer outside the state dict, computed in float32 on the
    CPU, hence equal on every device.

    Source: Su et al. 2021, "RoFormer", equations 15 and 34.
    """

    table: Tensor  # [2, M, D]: cosines, then sines

    def __init__(self, config: ModelConfig, *, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.channels = rotary_channels(config)
        self.base = float(config.rotary_base)
        shape = (2, config.max_position_embeddings, config.kv_channels)
        self.register_buffer("table", torch.empty(shape, device=device, dtype=torch.float32), persistent=False)

    def init_weights(self, initializer: WeightInitializer) -> None:
        """Compute the tables; draws nothing."""
        if self.table.is_meta:
            return
        half = self.channels // 2
        exponents = torch.arange(half, device="cpu", dtype=torch.float32) * (2.0 / self.channels)
        self.fill(torch.pow(self.base, -exponents))

    def fill(self, theta: Tensor, scale: float = 1.0) -> None:
        """Compute the tables from other frequencies than those of the base; the next `init_weights` undoes it.

        Args:
            theta: angles from one position to the next, half as many as channels that rotate; float32, on the CPU.
            scale: of cosines and sines of the channels that rotate.
        """
        positions = torch.arange(self.table.shape[1], device="cpu", dtype=torch.float32)
        angles = torch.outer(positions, theta)
        self.table[0].fill_(1.0)
        self.table[1].fill_(0.0)
        self.table[0, :, : self.channels].copy_(angles.cos().mul_(scale).repeat(1, 2))
        self.table[1, :, : self.channels].copy_(angles.sin().mul_(scale).repeat(1, 2))

    def forward(self, num_positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Give ``(cos_SD, sin_SD)`` of the first positions in ``dtype``: one kernel, none for float32."""
        cos_SD, sin_SD = self.table[:, :num_positions].to(dtype).unbind(0)
        return cos_SD, sin_SD


class _Rotation(torch.autograd.Function):
    """Rotation by ``direction * angle``; its backward is the rotation by the opposite angle.

    Written as a Function because the backward that autograd would derive from the same formula launches twice as many
    kernels.
    """

    @staticmethod
    def forward(ctx: Any, x_BSND: Tensor, cos_SD: Tensor, sin_SD: Tensor, half: int, direction: int) -> Tensor:
        ctx.save_for_backward(cos_SD, sin_SD)
        ctx.half = half
        ctx.direction = direction
        cos_S1D, sin_S1D = cos_SD.unsqueeze(1), sin_SD.unsqueeze(1)
        out_BSND = x_BSND * cos_S1D
        first, second = slice(0, half), slice(half, 2 * half)
        out_BSND[..., first].addcmul_(x_BSND[..., second], sin_S1D[..., first], value=-direction)
        out_BSND[..., second].addcmul_(x_BSND[..., first], sin_S1D[..., second], value=direction)
        return out_BSND

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        cos_SD, sin_SD = ctx.saved_tensors
        rotate: Callable[..., Tensor] = _Rotation.apply
        return rotate(grad_outputs[0], cos_SD, sin_SD, ctx.half, -ctx.direction), None, None, None, None


def apply_rotary(x_BSND: Tensor, cos_SD: Tensor, sin_SD: Tensor, *, channels: int) -> Tensor:
    """Rotate the first ``channels`` channels of each head by the angle of its position.

    With a = x[..., i] and b = x[..., i + channels / 2]: a' = a cos - b sin and b' = b cos + a sin.

    Args:
        x_BSND: queries, keys, or both side by side along N; any strides.
        cos_SD: cosines, 1 for channels that do not rotate; cast to the dtype of x if it differs.
        sin_SD: sines, likewise; 0 for channels that do not rotate.
        channels: even number of channels that rotate, at most D.

    Returns:
        [B, S, N, D], the dtype of x.

    Cost: three kernels forward, three backward; keeps no activation.
    Source: Su et al. 2021, "RoFormer", equation 34, channels paired as (i, i + channels / 2).
    """
    dtype = x_BSND.dtype
    rotate: Callable[..., Tensor] = _Rotation.apply
    return rotate(x_BSND, cos_SD.to(dtype), sin_SD.to(dtype), channels // 2, 1)
