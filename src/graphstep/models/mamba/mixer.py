"""The Mamba-2 mixer: projection, short convolution, state-space scan, gated normalisation, projection.

Shapes: B batch, S sequence, H hidden, F features of the projection, I inner width, P channels of a head, N state,
K width of the convolution, W convolved channels.
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
from graphstep.errors import ConfigError
from graphstep.models.autocast import without_autocast
from graphstep.models.initialization import WeightInitializer
from graphstep.models.linear import build_linear
from graphstep.models.mamba.layout import MixerLayout, MixerWeights
from graphstep.models.mamba.mixing import mix
from graphstep.models.mamba.plain import convolved_parts, is_mamba_ssm_installed, mix_plainly, scan_with_mamba_ssm
from graphstep.models.mamba.scan import final_state

CONVOLUTION_WIDTH: Final = 4
"""Tokens that the convolution sees, as in the paper."""
CHUNK_SIZE: Final = 256
"""Tokens that the scan takes at a time, at most, as in the paper's implementation."""
_NO_TIME: Final = -1e4
"""Before its bias and softplus: a time step that is zero in every type."""
_GOLDEN: Final = (math.sqrt(5.0) - 1.0) / 2.0


class Mamba2(nn.Module):
    """out(norm(scan(silu(conv(x, B, C)), dt) * silu(z)) * weight), with z, x, B, C and dt from one projection.

    The norm is taken over each group. Weights are laid out as those of published models (z, x, B, C, dt), except that
    row j of ``conv_weight`` [K, W] weighs the token j before. All parameters have one dtype; decays and time steps are
    computed in float32, and so are the states that decoding keeps.

    Args:
        config: hidden size, biases, epsilon of the norm.
        mamba: sizes.
        chunk_size: tokens that the scan takes at a time, at most. It does not change results but for rounding.
        use_mamba_ssm: scan with the kernels of the package `mamba-ssm`; None: where it is installed and ``device``
            is a GPU. Gradients of its kernels may differ from run to run.
        device: of the parameters.
        dtype: likewise.

    Raises:
        ConfigError: sizes that do not fit each other.

    Source: Dao and Gu 2024, "Transformers are SSMs", section 7 and figure 6.
    """

    causal: Tensor

    def __init__(
        self,
        config: ModelConfig,
        mamba: MambaConfig,
        *,
        chunk_size: int = CHUNK_SIZE,
        use_mamba_ssm: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check(config, mamba)
        heads, groups = mamba.num_heads(config.hidden_size), mamba.mamba_num_groups
        self.layout = MixerLayout(
            groups=groups,
            heads_per_group=heads // groups,
            channels=mamba.mamba_head_dim,
            state=mamba.mamba_state_dim,
        )
        self.chunk_size = chunk_size
        self.eps = config.norm_epsilon
        inner, convolved, _ = self.layout.widths
        bias = config.add_bias_linear
        self.in_proj = build_linear(
            config.hidden_size, sum(self.layout.widths), bias=bias, fp8=None, device=device, dtype=dtype
        )
        self.conv_weight = nn.Parameter(torch.empty(CONVOLUTION_WIDTH, convolved, device=device, dtype=dtype))
        self.conv_bias = nn.Parameter(torch.empty(convolved, device=device, dtype=dtype))
        self.dt_bias = nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
        self.A_log = nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
        self.D = nn.Parameter(torch.empty(heads, device=device, dtype=dtype))
        self.norm_weight = nn.Parameter(torch.empty(inner, device=device, dtype=dtype))
        self.out_proj = build_linear(inner, config.hidden_size, bias=bias, fp8=None, device=device, dtype=dtype)
        # Ones and zeros are exact in every dtype that the module may be cast to.
        causal = torch.ones(chunk_size, chunk_size, device=device, dtype=torch.float32).tril()
        self.register_buffer("causal", causal, persistent=False)
        if use_mamba_ssm is None:
            use_mamba_ssm = self.D.is_cuda and is_mamba_ssm_installed()
        self.uses_mamba_ssm = use_mamba_ssm

    def init_weights(self, initializer: WeightInitializer) -> None:
        """Draw weights, those of the output projection scaled by depth; spread decays and time steps over the heads.

        The decays are between 1 and 16 and the time steps, in even ratios, between 0.001 and 0.1, as in the paper's
        implementation, but taken from the multiples of the golden ratio instead of drawn: heads of all kinds, always.
        """
        initializer.normal_(self.in_proj.weight)
        initializer.residual_normal_(self.out_proj.weight)
        initializer.normal_(self.conv_weight)
        nn.init.zeros_(self.conv_bias)
        nn.init.ones_(self.D)
        nn.init.ones_(self.norm_weight)
        heads = self.layout.num_heads
        with torch.no_grad():
            self.causal.fill_(1.0).tril_()
            if not self.D.is_meta:
                self.A_log.copy_(torch.tensor([math.log(1 + 15 * (i + 0.5) / heads) for i in range(heads)]))
                steps = [1e-3 * 100 ** ((i * _GOLDEN) % 1.0) for i in range(heads)]
                self.dt_bias.copy_(torch.tensor([math.log(math.expm1(step)) for step in steps]))

    def forward(self, x_BSH: Tensor) -> Tensor:
        """Mix normalised hidden states [B, S, H] along the sequence to the update [B, S, H], before its dropout.

        Lengths that are no multiple of a chunk are padded inside: two copies.
        """
        update_BSH: Tensor = self._finish(self._mix(self.in_proj(x_BSH)))
        return update_BSH

    def new_states(self, batch_size: int) -> tuple[Tensor, Tensor]:
        """States of sequences without a token: ``conv_state`` [B, K - 1, W] and ``ssm_state`` [B, heads, P, N].

        The first row of ``conv_state`` is the last token; ``ssm_state`` is float32. Decoding writes both in place.
        """
        like, layout = self.in_proj.weight, self.layout
        conv_state = like.new_zeros(batch_size, CONVOLUTION_WIDTH - 1, layout.convolved)
        wide = torch.promote_types(like.dtype, torch.float32)
        return conv_state, like.new_zeros(batch_size, layout.num_heads, layout.channels, layout.state, dtype=wide)

    @torch.no_grad()
    def forward_with_state(self, x_BSH: Tensor, conv_state: Tensor, ssm_state: Tensor) -> Tensor:
        """The forward of sequences from their first token on, and into the states what :meth:`step` goes on from.

        Args:
            x_BSH: all sequences have S tokens; none is padding.
            conv_state: is overwritten, see :meth:`new_states`.
            ssm_state: likewise.
        """
        projected_BSF = self.in_proj(x_BSH)
        _, mixed, raw = projected_BSF.split(self.layout.widths, dim=-1)
        num_kept = min(CONVOLUTION_WIDTH - 1, x_BSH.shape[1])
        conv_state[:, :num_kept].copy_(mixed[:, -num_kept:].flip(1))
        conv_state[:, num_kept:].zero_()
        x, b, _ = convolved_parts(mixed, self.conv_weight, self.conv_bias, self.layout)
        dt, a = self._steps_and_decays(raw, ssm_state.dtype)
        ssm_state.copy_(final_state(x, dt, a, b))
        update_BSH: Tensor = self._finish(self._mix(projected_BSF))
        return update_BSH

    @torch.no_grad()
    def forward_from_state(self, x_BSH: Tensor, conv_state: Tensor, ssm_state: Tensor) -> Tensor:
        """More tokens of sequences whose states are given, to their update [B, S, H]; both states go on in place.

        What :meth:`step` would do for one token after the other, in one scan.
        """
        layout, num_before = self.layout, conv_state.shape[1]
        projected_BSF = self.in_proj(x_BSH)
        z, _, raw = projected_BSF.split(layout.widths, dim=-1)
        # The tokens before, as far as the convolution sees them; time steps of zero keep them out of the scan.
        before_BKF = projected_BSF.new_zeros(x_BSH.shape[0], num_before, projected_BSF.shape[-1])
        _, mixed_before, raw_before = before_BKF.split(layout.widths, dim=-1)
        mixed_before.copy_(conv_state.flip(1))
        raw_before.fill_(_NO_TIME)
        whole_BTF = torch.cat((before_BKF, projected_BSF), dim=1)
        mixed = whole_BTF.split(layout.widths, dim=-1)[1]
        x, b, c = (t[:, num_before:] for t in convolved_parts(mixed, self.conv_weight, self.conv_bias, layout))
        dt, a = self._steps_and_decays(raw, ssm_state.dtype)
        left_BSH = (dt * a).cumsum(1).exp()
        by_group = ssm_state.unflatten(1, (layout.groups, -1))
        from_state = torch.einsum("bsgn,bgrpn->bsgrp", c.to(ssm_state.dtype), by_group).flatten(2, 3)
        gate = functional.silu(z)
        gated = self._mix(whole_BTF)[:, num_before:] + (from_state * left_BSH[..., None]).flatten(2).to(z.dtype) * gate
        ssm_state.mul_(left_BSH[:, -1, :, None, None]).add_(final_state(x, dt, a, b))
        conv_state.copy_(mixed[:, -num_before:].flip(1))
        update_BSH: Tensor = self._finish(gated)
        return update_BSH

    @torch.no_grad()
    def step(self, x_BH: Tensor, conv_state: Tensor, ssm_state: Tensor) -> Tensor:
        """Take one more token of each sequence [B, H] to its update [B, H], and update both states in place.

        Suits capture: the states stay where they are.
        """
        layout = self.layout
        z, mixed, raw = self.in_proj(x_BH).split(layout.widths, dim=-1)
        window_BKW = torch.cat((mixed[:, None], conv_state), dim=1)
        conv_state.copy_(window_BKW[:, :-1])
        active = functional.silu((window_BKW * self.conv_weight).sum(1) + self.conv_bias).to(ssm_state.dtype)
        x, b, c = active.split((layout.inner, *[layout.groups * layout.state] * 2), dim=-1)
        x, b, c = x.unflatten(-1, (layout.num_heads, -1)), *(t.unflatten(-1, (layout.groups, 1, 1, -1)) for t in (b, c))
        dt, a = self._steps_and_decays(raw, ssm_state.dtype)
        by_group = ssm_state.unflatten(1, (layout.groups, -1))
        ssm_state.mul_((dt * a).exp()[..., None, None])
        by_group.addcmul_((x * dt[..., None]).unflatten(1, (layout.groups, -1))[..., None], b)
        y = (by_group * c).sum(-1).flatten(1, 2).addcmul_(x, self.D[:, None])
        update_BH: Tensor = self._finish(y.flatten(1).to(z.dtype) * functional.silu(z))
        return update_BH

    def _mix(self, projected_BSF: Tensor) -> Tensor:
        length, dtype = projected_BSF.shape[1], projected_BSF.dtype
        parameters = (self.conv_weight, self.conv_bias, self.dt_bias, self.A_log, self.D)
        # The projection has another dtype than they under autocast only; what follows chooses its dtypes itself.
        weights = MixerWeights(*(parameter.to(dtype) for parameter in parameters))
        with without_autocast(projected_BSF):
            if self.uses_mamba_ssm:
                return mix_plainly(projected_BSF, weights, self.chunk_size, self.layout, scan_with_mamba_ssm)
            if torch.compiler.is_compiling():
                return mix_plainly(projected_BSF, weights, self.chunk_size, self.layout)
            chunk, pad = _division(length, self.chunk_size)
            if pad:
                projected_BSF = functional.pad(projected_BSF, (0, 0, 0, pad))
            mixed = mix(projected_BSF, weights, self.causal[:chunk, :chunk], self.layout)
            return mixed[:, :length] if pad else mixed

    def _steps_and_decays(self, raw: Tensor, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        return functional.softplus(raw.to(wide) + self.dt_bias), -self.A_log.exp().to(wide)

    def _finish(self, gated: Tensor) -> Tensor:
        grouped = gated.unflatten(-1, (self.layout.groups, -1))
        normed = functional.rms_norm(grouped, grouped.shape[-1:], eps=self.eps).flatten(-2)
        update: Tensor = self.out_proj(normed * self.norm_weight)
        return update


def _division(length: int, chunk_size: int) -> tuple[int, int]:
    """The length of each chunk, and by how many tokens the sequence has to be padded.

    As few chunks as possible, all equally long, of a length that matrix products like.
    """
    if length <= chunk_size:
        return length, 0
    num_chunks = math.ceil(length / chunk_size)
    chunk = min(chunk_size, math.ceil(length / num_chunks / 8) * 8)
    return chunk, num_chunks * chunk - length


def _check(config: ModelConfig, mamba: MambaConfig) -> None:
    options = {"hidden_size": config.hidden_size, **mamba.options()}
    broken = [rule for rule in MAMBA_RULES if rule.is_range and rule.broken(SimpleNamespace(**options))]
    if not broken:
        broken = [rule for rule in MAMBA_RULES if rule.broken(SimpleNamespace(**options))]
    if broken:
        raise ConfigError([rule.problem(options) for rule in broken])
