"""Causal self-attention with grouped queries.

Shapes: B batch, S sequence, H hidden, N query heads, G query groups (key and value heads), D channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphstep.config.model import ModelConfig
from graphstep.models.delayed_scaling import DelayedScaling
from graphstep.models.initialization import WeightInitializer
from graphstep.models.linear import build_linear
from graphstep.models.norms import build_norm
from graphstep.models.rotary import apply_rotary, rotary_channels


class Attention(nn.Module):
    """softmax(Q K^T / sqrt(D), causal) V, then the output projection.

    The rows of the fused weight are all query heads, then all key heads, then all value heads. Query head n reads
    key and value head n * G // N. With ``qk_layernorm`` the queries and keys of each head are normalised
    before they rotate.

    Source: Vaswani et al. 2017, "Attention Is All You Need", equation 1; Ainslie et al. 2023, "GQA", section 2.2.
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
        self.num_heads = config.num_attention_heads
        self.num_groups = config.num_query_groups
        self.channels = config.kv_channels
        self.rotary_channels = rotary_channels(config)
        self.dropout = config.attention_dropout
        self.qkv = build_linear(
            config.hidden_size,
            (self.num_heads + 2 * self.num_groups) * self.channels,
            bias=config.add_bias_linear or config.add_qkv_bias,
            fp8=fp8,
            device=device,
            dtype=dtype,
        )
        self.query_norm = self.key_norm = None
        if config.qk_layernorm:
            self.query_norm = build_norm(config, size=self.channels, device=device, dtype=dtype)
            self.key_norm = build_norm(config, size=self.channels, device=device, dtype=dtype)
        self.out = build_linear(
            self.num_heads * self.channels,
            config.hidden_size,
            bias=config.add_bias_linear,
            fp8=fp8,
            device=device,
            dtype=dtype,
        )

    def init_weights(self, initializer: WeightInitializer) -> None:
        """Draw normal weights, those of the output projection scaled by depth."""
        initializer.normal_(self.qkv.weight)
        initializer.residual_normal_(self.out.weight)

    def forward(self, x_BSH: Tensor, *context: Tensor) -> Tensor:
        """Attend from each token to itself and to the ones before it.

        Args:
            x_BSH: normalised hidden states.
            context: ``(rope_cos_SD, rope_sin_SD)`` with rotary embedding, otherwise not looked at.

        Returns:
            [B, S, H]: the update of the residual stream, before its dropout.
        """
        batch, sequence, _ = x_BSH.shape
        heads, groups = self.num_heads, self.num_groups
        qkv_BSND = self.qkv(x_BSH).view(batch, sequence, heads + 2 * groups, self.channels)
        qkv_BSND = self.normalise_heads(qkv_BSND)
        if self.rotary_channels:
            # Queries and keys lie side by side: one rotation serves both, and no copy comes before it.
            qk_BSND, v_BSGD = qkv_BSND.split_with_sizes((heads + groups, groups), dim=2)
            qk_BSND = apply_rotary(qk_BSND, *context, channels=self.rotary_channels)
            q_BSND, k_BSGD = qk_BSND.split_with_sizes((heads, groups), dim=2)
        else:
            q_BSND, k_BSGD, v_BSGD = qkv_BSND.split_with_sizes((heads, groups, groups), dim=2)
        y_BSND = causal_attention(q_BSND, k_BSGD, v_BSGD, dropout=self.dropout if self.training else 0.0)
        update_BSH: Tensor = self.out(y_BSND.flatten(2))
        return update_BSH

    def normalise_heads(self, qkv: Tensor) -> Tensor:
        """Normalise the queries and keys of each head, where the model has that; otherwise give back the argument.

        Args:
            qkv: [..., N + 2 G, D]: all query heads, then all key heads, then all value heads.
        """
        if self.query_norm is None or self.key_norm is None:
            return qkv
        q, k, v = qkv.split_with_sizes((self.num_heads, self.num_groups, self.num_groups), dim=-2)
        # Where autocast normalises in float32, the values keep their type.
        return torch.cat((self.query_norm(q).to(v.dtype), self.key_norm(k).to(v.dtype), v), dim=-2)


def causal_attention(q_BSND: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, *, dropout: float = 0.0) -> Tensor:
    """Causal scaled dot-product attention; N must be a multiple of G.

    Args:
        q_BSND: queries.
        k_BSGD: keys; query head n uses key head n * G // N.
        v_BSGD: values, likewise.
        dropout: probability of dropping an attention weight; 0 draws no random number.

    Returns:
        [B, S, N, D]. The fused kernels return it in this memory order, so merging the heads is a view.

    Cost: one fused operator, except with dropout on the CPU. On CUDA the fused kernels that know groups take 16-bit
    types only; for others the keys and values are repeated (two copies), because the unfused path costs 17 kernels.
    Source: Vaswani et al. 2017, equation 1, scale 1/sqrt(D).
    """
    q_BNSD, k_BGSD, v_BGSD = q_BSND.transpose(1, 2), k_BSGD.transpose(1, 2), v_BSGD.transpose(1, 2)
    repeats = q_BNSD.shape[1] // k_BGSD.shape[1]
    native_groups = repeats > 1 and (not q_BNSD.is_cuda or q_BNSD.dtype in (torch.float16, torch.bfloat16))
    if repeats > 1 and not native_groups:
        k_BGSD, v_BGSD = k_BGSD.repeat_interleave(repeats, dim=1), v_BGSD.repeat_interleave(repeats, dim=1)
    y_BNSD = functional.scaled_dot_product_attention(
        q_BNSD, k_BGSD, v_BGSD, dropout_p=dropout, is_causal=True, enable_gqa=native_groups
    )
    return y_BNSD.transpose(1, 2)
