"""Everything between the two projections of a mixer but the norm, as one operation with a gradient of its own.

Autograd over the plain formulas takes twice the kernels, a copy for each change of layout, and several matrices of
tokens by tokens for each head. Shapes: see `layout.py` and `chunks.py`; K width of the convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from graphstep.models.mamba.chunks import Scanned, scan_chunks, scan_chunks_backward, sums_so_far
from graphstep.models.mamba.convolution import convolve, convolve_backward
from graphstep.models.mamba.layout import MixerLayout, MixerWeights


def mix(projected_BSF: Tensor, weights: MixerWeights, causal_QQ: Tensor, layout: MixerLayout) -> Tensor:
    """scan(silu(conv(x, B, C)), softplus(dt + bias)) * silu(z).

    Args:
        projected_BSF: z, x, B, C and dt, see ``layout``; S is a multiple of Q.
        weights: in the dtype of ``projected_BSF``.
        causal_QQ: ones on and below the diagonal, zeros above. Q is the chunk size.
        layout: sizes.

    Returns:
        [B, S, I]. Differentiable once.

    Cost: for one chunk 24 kernels forward and 40 backward, for two 28 and 54, in 16 bits; from four on, each chunk
    takes one more both ways.
    """
    function: Callable[..., Tensor] = _Mix.apply
    return function(projected_BSF, *weights, causal_QQ, layout)


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        projected: Tensor,
        conv_weight: Tensor,
        conv_bias: Tensor,
        dt_bias: Tensor,
        a_log: Tensor,
        d: Tensor,
        causal: Tensor,
        layout: MixerLayout,
    ) -> Tensor:
        chunk = len(causal)
        wide = torch.promote_types(projected.dtype, torch.float32)
        z, mixed, raw = projected.split(layout.widths, dim=-1)
        before = convolve(mixed, conv_weight, conv_bias)
        x = _silu(layout.by_head(before[..., : layout.inner], chunk))
        bc = _silu(layout.by_group(before[..., layout.inner :], chunk))
        steps = _new(layout.by_step(raw, chunk), wide)
        torch.add(layout.by_step(raw, chunk), _per_head(dt_bias.to(wide), layout), out=steps)
        dt = torch.nn.functional.softplus(steps)
        a = _per_head(torch.exp(a_log, out=torch.empty_like(a_log, dtype=wide)).neg_(), layout)
        y, scanned = scan_chunks(x, dt, sums_so_far(dt * a, causal), bc[0], bc[1], causal)
        scan = projected.new_empty(z.shape)
        torch.addcmul(y, x, _per_head(d, layout)[..., None], out=layout.by_head(scan, chunk))
        gate = torch.nn.functional.silu(z)
        ctx.layout, ctx.chunk = layout, chunk
        ctx.save_for_backward(
            causal, projected, conv_weight, d, before, x, bc, steps, dt, a, scan, gate, *scanned.tensors()
        )
        return scan * gate

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        layout: MixerLayout = ctx.layout
        chunk: int = ctx.chunk
        grad_out: Tensor = grad_outputs[0]
        causal, projected, conv_weight, d, before, x, bc, steps, dt, a, scan, gate, *rest = ctx.saved_tensors
        aten = torch.ops.aten
        z, mixed, _ = projected.split(layout.widths, dim=-1)
        grad_projected = torch.empty_like(projected)
        grad_z, grad_mixed, grad_raw = grad_projected.split(layout.widths, dim=-1)
        aten.silu_backward.grad_input(grad_out * scan, z, grad_input=grad_z)
        grad_y = torch.mul(layout.by_head(grad_out, chunk), layout.by_head(gate, chunk), out=torch.empty_like(x))
        grad_d = (grad_y * x).sum((0, 3, 4, 5)).view(-1)
        grad_x_dt, grad_cum, grad_bc = scan_chunks_backward(grad_y, x, dt, bc[0], bc[1], Scanned(*rest))
        grad_x = (grad_y * _per_head(d, layout)[..., None]).addcmul_(grad_x_dt, dt[..., None])

        grad_a_dt = sums_so_far(grad_cum.flip(-1), causal).flip(-1)
        grad_dt = (grad_x_dt * x).sum(-1, dtype=dt.dtype).addcmul_(grad_a_dt, a)
        grad_a_log = ((grad_a_dt * dt).sum((0, 3, 4), keepdim=True) * a).view(-1)
        grad_steps = aten.softplus_backward(grad_dt, steps, 1.0, 20.0)
        layout.by_step(grad_raw, chunk).copy_(grad_steps)
        grad_dt_bias = grad_steps.sum((0, 3, 4)).view(-1)

        batch, length, width = before.shape
        padded = before.new_empty(batch, length + len(conv_weight) - 1, width)
        padded[:, length:].zero_()
        for part, grad, view in (
            (slice(0, layout.inner), grad_x, layout.by_head),
            (slice(layout.inner, None), grad_bc, layout.by_group),
        ):
            aten.silu_backward.grad_input(
                grad, view(before[..., part], chunk), grad_input=view(padded[:, :length, part], chunk)
            )
        grad_weight, grad_bias = convolve_backward(padded, mixed, conv_weight, grad_x_BSW=grad_mixed)
        narrow = projected.dtype
        of_decays = grad_dt_bias.to(narrow), grad_a_log.to(narrow), grad_d
        return grad_projected, grad_weight, grad_bias, *of_decays, None, None


def _new(view: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(view.shape, dtype=dtype, device=view.device)


def _silu(view: Tensor) -> Tensor:
    """The activation, written contiguously: the change of layout costs no copy."""
    activated: Tensor = torch.ops.aten.silu.out(view, out=_new(view, view.dtype))
    return activated


def _per_head(values_H: Tensor, layout: MixerLayout) -> Tensor:
    return values_H.view(1, layout.groups, layout.heads_per_group, 1, 1)
