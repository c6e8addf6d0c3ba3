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
    """The same outputs as matrix products within chunks, and a recurrence of one step for each chunk."""
    batch, length, heads, channels = x_BSHP.shape
    groups, state = b_BSGN.shape[2:]
    pad = -length % chunk_size
    x, dt, b, c = (functional.pad(t, (0, 0) * (t.dim() - 2) + (0, pad)) for t in (x_BSHP, dt_BSH, b_BSGN, c_BSGN))
    split = (batch, -1, chunk_size, groups)
    per = heads // groups
    x = x.view(*split, per, channels)
    dt = dt.view(*split, per).float()
    b, c = b.view(*split, state), c.view(*split, state)
    cum = torch.cumsum(dt * a_H.float().view(groups, per), dim=2)  # [B, C, Q, G, R]
    mask = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=x.device).tril()
    decay = torch.where(mask[:, :, None, None], cum[:, :, :, None] - cum[:, :, None], -torch.inf).exp()
    scores = torch.einsum("zcqgn,zckgn->zcqkg", c, b)[..., None] * decay * dt[:, :, None]
    y = torch.einsum("zcqkgr,zckgrp->zcqgrp", scores.to(x.dtype), x)
    weights = (cum[:, :, -1:] - cum).exp() * dt
    states = torch.einsum("zckgrp,zckgn->zcgrpn", (x * weights[..., None]).to(x.dtype), b).float()
    before = [torch.zeros_like(states[:, 0])]
    for chunk in range(states.shape[1] - 1):
        before.append(before[-1] * cum[:, chunk, -1, :, :, None, None].exp() + states[:, chunk])
    carried = torch.stack(before, dim=1).to(x.dtype)
    y = y + torch.einsum("zcqgn,zcgrpn->zcqgrp", c, carried) * cum.exp()[..., None]
    y = y + d_H.view(groups, per, 1) * x
    return y.to(x.dtype).reshape(batch, length + pad, heads, channels)[:, :length]
