"""State-space duality: the scan of Mamba-2, as a recurrence and in chunks.

Shapes: B batch, S sequence, H heads, P channels of a head, G groups of heads, N state; C chunks of Q tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def recurrent_scan(
    x_BSHP: Tensor, dt_BSH: Tensor, a_H: Tensor, b_BSGN: Tensor, c_BSGN: Tensor, d_H: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence as it is defined, token by token: slow, and what the other forms are compared with.

    Returns:
        Outputs [B, S, H, P], and the state after the last token [B, H, P, N].

    Source: Dao and Gu 2024, "Transformers are SSMs", equations 1 and 2, discretised as in section 7.
    """
    heads_per_group = x_BSHP.shape[2] // b_BSGN.shape[2]
    b_BSHN, c_BSHN = (t.repeat_interleave(heads_per_group, dim=2) for t in (b_BSGN, c_BSGN))
    state_BHPN = x_BSHP.new_zeros(*x_BSHP.shape[:1], *x_BSHP.shape[2:], b_BSGN.shape[-1])
    outputs = []
    for t in range(x_BSHP.shape[1]):
        dt_BH11 = dt_BSH[:, t, :, None, None]
        update = x_BSHP[:, t, :, :, None] * b_BSHN[:, t, :, None, :] * dt_BH11
        state_BHPN = state_BHPN * torch.exp(dt_BH11 * a_H[:, None, None]) + update
        outputs.append((state_BHPN * c_BSHN[:, t, :, None, :]).sum(-1) + d_H[:, None] * x_BSHP[:, t])
    return torch.stack(outputs, dim=1), state_BHPN


def chunked_scan(
    x_BSHP: Tensor,
    dt_BSH: Tensor,
    a_H: Tensor,
    b_BSGN: Tensor,
    c_BSGN: Tensor,
    d_H: Tensor,
    *,
    chunk_size: int,
) -> Tensor:
    """The same outputs as matrix products within chunks, and a recurrence of one step for each chunk.

    Plain formulas, for compilers and to read; `chunks.py` does the same in few kernels.

    Source: Dao and Gu 2024, "Transformers are SSMs", section 6.
    """
    length = x_BSHP.shape[1]
    pad = -length % chunk_size
    x, dt, b, c = (functional.pad(t, (0, 0) * (t.dim() - 2) + (0, pad)) for t in (x_BSHP, dt_BSH, b_BSGN, c_BSGN))
    x, dt, b, c = (t.unflatten(1, (-1, chunk_size)) for t in (x, dt, b, c))
    groups = b.shape[3]
    x, dt, a, d = (
        x.unflatten(3, (groups, -1)),
        dt.unflatten(3, (groups, -1)),
        a_H.view(groups, -1),
        d_H.view(groups, -1),
    )
    cum = _running_sum(dt * a)  # [B, C, Q, G, R]
    differences = (cum[:, :, :, None] - cum[:, :, None]).clamp(max=0)  # Above the diagonal, where it could overflow.
    scores = torch.einsum("zcqgn,zckgn->zcqkg", c, b).permute(0, 1, 4, 2, 3).tril().permute(0, 1, 3, 4, 2)
    mixing = scores[..., None] * differences.exp() * dt[:, :, None]
    y = torch.einsum("zcqkgr,zckgrp->zcqgrp", mixing.to(x.dtype), x)
    kept = (x * ((cum[:, :, -1:] - cum).exp() * dt)[..., None]).to(x.dtype)
    states = torch.einsum("zckgrp,zckgn->zcgrpn", kept, b).to(cum.dtype)
    before = [torch.zeros_like(states[:, 0])]
    for chunk in range(states.shape[1] - 1):
        before.append(before[-1] * cum[:, chunk, -1, :, :, None, None].exp() + states[:, chunk])
    carried = torch.stack(before, dim=1).to(x.dtype)
    y = y + torch.einsum("zcqgn,zcgrpn->zcqgrp", c, carried) * cum.exp()[..., None] + d[..., None] * x
    y_BSHP: Tensor = y.to(x.dtype).flatten(3, 4).flatten(1, 2)[:, :length]
    return y_BSHP


def _running_sum(values_BCQGR: Tensor) -> Tensor:
    """Sums over the steps of a chunk up to each one."""
    if not torch.compiler.is_compiling():
        return values_BCQGR.cumsum(2)
    # Inductor of torch 2.11 fails on scans of this shape on a GPU; a masked sum becomes one kernel as well.
    steps_Q = torch.arange(values_BCQGR.shape[2], device=values_BCQGR.device)
    is_before_QQ = (steps_Q[:, None] >= steps_Q)[..., None, None]
    return (values_BCQGR[:, :, None] * is_before_QQ).sum(3)


def final_state(x_BSHP: Tensor, dt_BSH: Tensor, a_H: Tensor, b_BSGN: Tensor) -> Tensor:
    """The state [B, H, P, N] after the last token, in the dtype of ``dt``: one matrix product for each group.

    Decays are counted from the last token backwards, so that those of the last tokens are exact in long sequences.
    """
    groups = b_BSGN.shape[2]
    decays_BSH = dt_BSH * a_H
    left_BSH = (decays_BSH.flip(1).cumsum(1).flip(1) - decays_BSH).exp()
    kept_BSHP = x_BSHP.to(dt_BSH.dtype) * (left_BSH * dt_BSH)[..., None]
    b_BGSN = b_BSGN.to(dt_BSH.dtype).transpose(1, 2)
    kept_BGSK = kept_BSHP.unflatten(2, (groups, -1)).flatten(3).transpose(1, 2)
    state_BHPN: Tensor = (kept_BGSK.mT @ b_BGSN).view(*x_BSHP.shape[:1], *x_BSHP.shape[2:], -1)
    return state_BHPN
