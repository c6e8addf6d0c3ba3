"""The mixing of a Mamba-2 layer in plain formulas: for compilers, and around kernels of the `mamba-ssm` package.

Shapes: see `mixing.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from graphstep.models.mamba.layout import MixerLayout, MixerWeights
from graphstep.models.mamba.scan import chunked_scan

Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, Tensor], Tensor]
"""``scan(x_BSHP, dt_BSH, a_H, b_BSGN, c_BSGN, chunk_size, d_H) -> y_BSHP``."""


def is_mamba_ssm_installed() -> bool:
    """Is there a package `mamba-ssm`, whose kernels could scan?"""
    return importlib.util.find_spec("mamba_ssm") is not None


def scan_with_mamba_ssm(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk_size: int, d: Tensor) -> Tensor:
    """The scan of the package `mamba-ssm`, which needs Triton and a GPU."""
    kernels = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    y: Tensor = kernels.mamba_chunk_scan_combined(x, dt, a, b, c, chunk_size, D=d)
    return y


def scan_in_plain_operations(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk_size: int, d: Tensor
) -> Tensor:
    """`chunked_scan`."""
    return chunked_scan(x, dt, a, b, c, d, chunk_size=min(chunk_size, x.shape[1]))


def mix_plainly(
    projected_BSF: Tensor,
    weights: MixerWeights,
    chunk_size: int,
    layout: MixerLayout,
    scan: Scan = scan_in_plain_operations,
) -> Tensor:
    """What `mix` returns, for any length of the sequence."""
    z, mixed, raw = projected_BSF.split(layout.widths, dim=-1)
    x, b, c = convolved_parts(mixed, weights.conv_weight, weights.conv_bias, layout)
    wide = torch.promote_types(raw.dtype, torch.float32)
    dt = functional.softplus(raw.to(wide) + weights.dt_bias.to(wide))
    y = scan(x, dt, -weights.a_log.exp().to(wide), b, c, chunk_size, weights.d)
    return y.flatten(2) * functional.silu(z)


def convolved_parts(
    mixed_BSW: Tensor, weight_KW: Tensor, bias_W: Tensor, layout: MixerLayout
) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs of the scan: x [B, S, H, P], b and c [B, S, G, N]."""
    weight_W1K = weight_KW.flip(0).t()[:, None]
    padded_BWT = functional.pad(mixed_BSW.mT, (weight_KW.shape[0] - 1, 0))
    active = functional.silu(functional.conv1d(padded_BWT, weight_W1K, bias_W, groups=layout.convolved)).mT
    x, b, c = active.split((layout.inner, *[layout.groups * layout.state] * 2), dim=-1)
    by_head = x.unflatten(-1, (layout.num_heads, layout.channels))
    return by_head, b.unflatten(-1, (layout.groups, -1)), c.unflatten(-1, (layout.groups, -1))
