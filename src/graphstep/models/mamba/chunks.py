"""The chunked scan of Mamba-2 and its gradient, in few operations on large tensors.

Shapes: C chunks, G groups, R heads of a group, B batch, Q tokens of a chunk, P channels of a head, N state. Tensors of
``[C, G, R, B, Q, ...]`` are contiguous, so that they are batches of matrices; those whose heads lie side by side are
``[C, G, B, Q, R, P]``. Matrices have the dtype of the model, exponents and time steps float32 (or float64).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from graphstep.models.mamba.layout import heads_first, heads_last, matrices


@dataclass(frozen=True, slots=True)
class Scanned:
    """What the gradient needs of the scan beside its inputs."""

    decay: Tensor
    """exp(cum[t] - cum[s]) [C, G, R, B, Q, Q], where s <= t; above the diagonal exp(cum[t])."""
    mixing: Tensor
    """The matrix of each chunk [C, G, R, B, Q, Q]: y = mixing @ (x * dt), without earlier chunks."""
    x_dt: Tensor
    """[C, G, R, B, Q, P]."""
    decay_in: Tensor
    """exp(cum) [C, G, R, B, Q]: what is left at a token of the state before its chunk."""
    x_kept: Tensor
    """x * dt times its decay to the end of the chunk, all chunks but the last [C-1, G, B, Q, R, P]; empty for one."""
    states: Tensor
    """State after each chunk but the last [C-1, G, B, N, R * P]."""
    from_states: Tensor
    """What the states give to the outputs of the chunks after them, before its decay [C-1, G, B, Q, R * P]."""

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in the order of the constructor."""
        return tuple(getattr(self, field.name) for field in fields(self))


def scan_chunks(x: Tensor, dt: Tensor, cum: Tensor, b: Tensor, c: Tensor, causal_QQ: Tensor) -> tuple[Tensor, Scanned]:
    """The scan without its skip connection.

    Args:
        x: [C, G, R, B, Q, P].
        dt: time steps [C, G, R, B, Q].
        cum: sums of ``a * dt`` from the start of the chunk up to each token, all below zero.
        b: [C, G, B, Q, N].
        c: likewise.
        causal_QQ: ones on and below the diagonal, zeros above.

    Source: Dao and Gu 2024, "Transformers are SSMs", section 6.
    """
    num_chunks = x.shape[0]
    # No difference above the diagonal: it could overflow. The scores are zero there.
    exponents = torch.addcmul(cum[..., :, None], cum[..., None, :], causal_QQ, value=-1)
    decay = torch.exp(exponents, out=torch.empty_like(exponents, dtype=x.dtype))
    scores = torch.bmm(matrices(c), matrices(b).mT).tril_()
    mixing = decay * scores.view(*c.shape[:2], 1, *c.shape[2:-1], -1)
    x_dt = torch.mul(x, dt[..., None], out=torch.empty_like(x))
    y = torch.bmm(matrices(mixing), matrices(x_dt)).view(x.shape)
    decay_in = cum.exp()
    x_kept = heads_last(x[1:]).new_empty(heads_last(x[1:]).shape)
    states = from_states = x_kept
    if num_chunks > 1:
        torch.mul(x_dt[:-1], decay[:-1, ..., -1, :, None], out=heads_first(x_kept))
        states = torch.bmm(matrices(b[:-1]).mT, matrices(x_kept.flatten(-2)))
        states = _carry(states.view(*b[1:].shape[:3], b.shape[-1], -1), decay_in[1:-1, ..., -1])
        from_states = torch.bmm(matrices(c[1:]), matrices(states)).view(x_kept.shape)
        y[1:].addcmul_(heads_first(from_states), decay_in[1:, ..., None])
    return y, Scanned(decay, mixing, x_dt, decay_in, x_kept, states, from_states)


def scan_chunks_backward(
    grad: Tensor, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, scanned: Scanned
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x * dt, of cum, and of b and c side by side [2, C, G, B, Q, N].

    An exponent's gradient is the gradient of what it scales times that: nothing is divided, and no exponent is kept.
    The gradients of cum within a chunk are sums over rows and over columns of the same rounded numbers, so that they
    cancel where they have to.
    """
    wide = dt.dtype
    grad_mixing = torch.bmm(matrices(grad), matrices(scanned.x_dt).mT).view(scanned.mixing.shape)
    grad_x_dt = torch.bmm(matrices(scanned.mixing).mT, matrices(grad)).view(x.shape)
    of_exponents = grad_mixing * scanned.mixing
    grad_cum = of_exponents.sum(-1, dtype=wide).sub_(of_exponents.sum(-2, dtype=wide))
    grad_scores = matrices(grad_mixing.mul_(scanned.decay).sum(2)).tril_()
    grad_bc = torch.empty((2, *b.shape), dtype=b.dtype, device=b.device)
    grad_b, grad_c = grad_bc.unbind()
    torch.bmm(grad_scores.mT, matrices(c), out=matrices(grad_b))
    torch.bmm(grad_scores, matrices(b), out=matrices(grad_c))
    if x.shape[0] > 1:
        grad_in = torch.empty_like(scanned.x_kept)
        torch.mul(grad[1:], scanned.decay_in[1:, ..., None], out=heads_first(grad_in))
        in_QK, states = matrices(grad_in.flatten(-2)), matrices(scanned.states)
        matrices(grad_c[1:]).baddbmm_(in_QK, states.mT)
        grad_states = torch.bmm(matrices(c[1:]).mT, in_QK).view(scanned.states.shape)
        grad_cum[1:].add_(_by_step((grad_in * scanned.from_states).sum(-1, dtype=wide)))
        grad_states = _carry_backward(grad_states, scanned, grad_cum)
        grad_kept = torch.bmm(matrices(b[:-1]), matrices(grad_states)).view(scanned.x_kept.shape)
        matrices(grad_b[:-1]).baddbmm_(matrices(scanned.x_kept.flatten(-2)), matrices(grad_states).mT)
        grad_x_dt[:-1].addcmul_(heads_first(grad_kept), scanned.decay[:-1, ..., -1, :, None])
        of_kept = _by_step((grad_kept * scanned.x_kept).sum(-1, dtype=wide))
        grad_cum[:-1].sub_(of_kept)
        grad_cum[:-1, ..., -1].add_(of_kept.sum(-1))
    return grad_x_dt, grad_cum, grad_bc


def sums_so_far(values: Tensor, causal_QQ: Tensor) -> Tensor:
    """The sum of each value [..., Q] and of those before it.

    On a GPU PyTorch's own counts as not deterministic and is refused where only such operations are asked for.
    """
    if torch.are_deterministic_algorithms_enabled():
        return (values[..., None, :] * causal_QQ).sum(-1)
    return values.cumsum(-1)


def _by_step(sums_CGBQR: Tensor) -> Tensor:
    return sums_CGBQR.permute(0, 1, 4, 2, 3)


def _carry(states: Tensor, decay_CGRB: Tensor) -> Tensor:
    """Add to each chunk's own state what the states before it leave: one step for each chunk after the second."""
    if not len(decay_CGRB):
        return states
    carried: Tensor = states.to(decay_CGRB.dtype, copy=True).unflatten(-1, (decay_CGRB.shape[2], -1))
    for chunk, decay_GRB in enumerate(decay_CGRB, 1):
        carried[chunk].addcmul_(carried[chunk - 1], decay_GRB.mT[:, :, None, :, None])
    return carried.flatten(-2).to(states.dtype)


def _carry_backward(grad_states: Tensor, scanned: Scanned, grad_cum: Tensor) -> Tensor:
    decay_CGRB = scanned.decay_in[1:-1, ..., -1]
    if not len(decay_CGRB):
        return grad_states
    grads: Tensor = grad_states.to(decay_CGRB.dtype, copy=True).unflatten(-1, (decay_CGRB.shape[2], -1))
    for chunk in range(len(decay_CGRB), 0, -1):
        grads[chunk - 1].addcmul_(grads[chunk], decay_CGRB[chunk - 1].mT[:, :, None, :, None])
    of_decays_CGBR = (grads[1:] * scanned.states[:-1].view(grads[1:].shape)).sum((3, 5))
    grad_cum[1:-1, ..., -1].addcmul_(of_decays_CGBR.mT, decay_CGRB)
    return grads.flatten(-2).to(grad_states.dtype)
