"""The Mamba-2 mixer: projection, short convolution, state-space scan, gated normalisation, projection.

Shapes: B batch, S sequence, H hidden, I inner width (heads * channels of a head), G groups, N state.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphstep.config.mamba import MambaConfig
from graphstep.config.model import ModelConfig
from graphstep.config.rules.mamba import MAMBA_RULES
from graphstep.errors import ConfigError, Problem
from graphstep.models.initialization import WeightInitializer
from graphstep.models.linear import build_linear
from graphstep.models.mamba.scan import chunked_scan

CONVOLUTION_WIDTH: Final = 4
"""Tokens that the convolution sees, as in the paper."""
CHUNK_SIZE: Final = 128
"""Tokens that the scan takes at a time."""


class Mamba2(nn.Module):
    """out(norm(scan(silu(conv(x, B, C)), dt) * silu(z))), with z, x, B, C and dt from one projection.

    Source: Dao and Gu 2024, "Transformers are SSMs", section 7 and figure 6.
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
        _check(config, mamba)
        self.num_heads = mamba.num_heads(config.hidden_size)
        self.channels = mamba.mamba_head_dim
        self.num_groups = mamba.mamba_num_groups
        self.state_dim = mamba.mamba_state_dim
        self.chunk_size = chunk_size
        self.eps = config.norm_epsilon
        inner = self.num_heads * self.channels
        mixed = inner + 2 * self.num_groups * self.state_dim
        self.sizes = (inner, mixed, self.num_heads)
        self.in_proj = build_linear(
            config.hidden_size, sum(self.sizes), bias=config.add_bias_linear, fp8=None, device=device, dtype=dtype
        )
        self.conv_weight = nn.Parameter(torch.empty(mixed, CONVOLUTION_WIDTH, device=device, dtype=dtype))
        self.conv_bias = nn.Parameter(torch.empty(mixed, device=device, dtype=dtype))
        self.dt_bias = nn.Parameter(torch.empty(self.num_heads, device=device, dtype=dtype))
        self.A_log = nn.Parameter(torch.empty(self.num_heads, device=device, dtype=dtype))
        self.D = nn.Parameter(torch.empty(self.num_heads, device=device, dtype=dtype))
        self.norm_weight = nn.Parameter(torch.empty(inner, device=device, dtype=dtype))
        self.out_proj = build_linear(
            inner, config.hidden_size, bias=config.add_bias_linear, fp8=None, device=device, dtype=dtype
        )

    def init_weights(self, initializer: WeightInitializer) -> None:
        """Draw weights, those of the output projection scaled by depth; decays and time steps spread over heads."""
        initializer.normal_(self.in_proj.weight)
        initializer.residual_normal_(self.out_proj.weight)
        initializer.normal_(self.conv_weight)
        nn.init.zeros_(self.conv_bias)
        nn.init.ones_(self.D)
        nn.init.ones_(self.norm_weight)
        with torch.no_grad():
            spread = torch.linspace(0.0, 1.0, self.num_heads)
            self.A_log.copy_((1.0 + 15.0 * spread).log())
            dt = torch.exp(math.log(1e-3) + spread * (math.log(0.1) - math.log(1e-3)))
            self.dt_bias.copy_(torch.log(torch.expm1(dt)))

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Mix normalised hidden states [B, S, H] along the sequence to the update [B, S, H], before its dropout."""
        batch, length, _ = x_BSH.shape
        z_BSI, mixed_BSM, dt_BSH = self.in_proj(x_BSH).split(self.sizes, dim=-1)
        padded = functional.pad(mixed_BSM.transpose(1, 2), (CONVOLUTION_WIDTH - 1, 0))
        mixed = functional.conv1d(padded, self.conv_weight[:, None], self.conv_bias, groups=self.sizes[1])
        of_state = self.num_groups * self.state_dim
        x, b, c = functional.silu(mixed).transpose(1, 2).split((self.sizes[0], of_state, of_state), dim=-1)
        y = chunked_scan(
            x.reshape(batch, length, self.num_heads, self.channels),
            functional.softplus(dt_BSH.float() + self.dt_bias),
            -self.A_log.float().exp(),
            b.reshape(batch, length, self.num_groups, self.state_dim),
            c.reshape(batch, length, self.num_groups, self.state_dim),
            self.D,
            chunk_size=min(self.chunk_size, length),
        )
        gated = y.reshape(batch, length, -1) * functional.silu(z_BSI)
        normed = functional.rms_norm(
            gated.unflatten(-1, (self.num_groups, -1)), (gated.shape[-1] // self.num_groups,), eps=self.eps
        )
        update_BSH: Tensor = self.out_proj(normed.flatten(-2) * self.norm_weight)
        return update_BSH


def _check(config: ModelConfig, mamba: MambaConfig) -> None:
    options = {"hidden_size": config.hidden_size, **mamba.options()}
    broken = [rule for rule in MAMBA_RULES if rule.is_range and rule.broken(SimpleNamespace(**options))]
    if not broken:
        broken = [rule for rule in MAMBA_RULES if rule.broken(SimpleNamespace(**options))]
    if broken:
        raise ConfigError([Problem(r.code, r.what.format_map(options), r.where, r.fix) for r in broken])
