"""Order of rows: which token each row of an expert's input holds, and which row each choice of a token went to.

Shapes: T tokens, K experts of a token, E experts, C rows of an expert with a capacity, H hidden; N rows that experts
are given: R without padding, E * C with it. A *choice* is one of the R = T * K pairs of a token and an expert.

Everything stays on the device, and shapes follow from those of the arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from graphstep.config.choices import TokenDropPolicy
from graphstep.models.autocast import without_autocast


class RowOrder(NamedTuple):
    """Rows sorted by expert, within an expert by token unless the capacity chooses by weight."""

    choices: Tensor
    """int64 [N]: the choice that a row holds, ``token * K + k``."""
    tokens: Tensor
    """int64 [N]: the token that a row holds."""
    rows: Tensor
    """int64 [T, K]: the row that a choice went to; any row if it was dropped."""
    ends: Tensor
    """int32 [E]: the row behind the last one of each expert. Rows behind the last end hold dropped choices."""
    kept: Tensor | None = None
    """bool [T, K]: the choice was not dropped. None: none can be."""
    filled: Tensor | None = None
    """bool [N]: the row holds a choice that was kept. None: all do."""


def expert_capacity(num_tokens: int, num_experts: int, top_k: int, factor: float) -> int:
    """Return the rows of an expert, C: ``factor`` times a balanced load, rounded up, and at most all tokens.

    Source: Fedus et al. 2021, "Switch Transformers", equation 3.
    """
    return min(num_tokens, math.ceil(num_tokens * top_k / num_experts * factor))


def row_order(experts_TK: Tensor, num_experts: int) -> RowOrder:
    """Order of all choices; none is dropped.

    Args:
        experts_TK: int64, the experts of each token; numbers from ``num_experts`` on sort behind the last end.
        num_experts: E.

    Cost: a sort of small whole numbers, and five small kernels.
    """
    keys_N, choices_N = _sorted_by_expert(experts_TK.flatten(), num_experts)
    return RowOrder(
        choices_N,
        tokens=choices_N // experts_TK.shape[1],
        rows=_inverse(choices_N).view(experts_TK.shape),
        ends=_ends(keys_N, num_experts),
    )


def row_order_by_capacity(
    experts_TK: Tensor, probs_TK: Tensor, num_experts: int, capacity: int, policy: TokenDropPolicy
) -> RowOrder:
    """Order of the choices that fit into the capacity of their expert; the others come behind the last end.

    Args:
        experts_TK: int64, the experts of each token.
        probs_TK: weights of the choices; what they are matters to the policy ``probs`` only.
        num_experts: E.
        capacity: C.
        policy: keep the choices of the highest weight, or those of the first tokens. Ties: the first.
    """
    keys_R, choices_R = _by_priority(experts_TK, probs_TK, num_experts, policy)
    places_R = torch.arange(choices_R.shape[0], device=choices_R.device)
    kept_R = places_R - torch.searchsorted(keys_R, keys_R) < capacity
    keys_N, again_N = torch.sort(keys_R.masked_fill(~kept_R, num_experts), stable=True)
    choices_N, filled_N = choices_R[again_N], keys_N < num_experts
    inverse_N = _inverse(choices_N)
    return RowOrder(
        choices_N,
        tokens=choices_N // experts_TK.shape[1],
        rows=inverse_N.view(experts_TK.shape),
        ends=_ends(keys_N, num_experts),
        kept=filled_N[inverse_N].view(experts_TK.shape),
        filled=filled_N,
    )


def row_order_padded(
    experts_TK: Tensor, probs_TK: Tensor, num_experts: int, capacity: int, policy: TokenDropPolicy
) -> RowOrder:
    """Order of the choices in E blocks of C rows each. A row without a choice holds some other choice's token.

    Arguments are those of :func:`row_order_by_capacity`; ``ends`` are the multiples of C.
    """
    keys_R, choices_R = _by_priority(experts_TK, probs_TK, num_experts, policy)
    ids_E = torch.arange(num_experts, device=keys_R.device, dtype=keys_R.dtype)
    starts_E = torch.searchsorted(keys_R, ids_E)
    ends_E = torch.searchsorted(keys_R, ids_E, right=True)
    places_C = torch.arange(capacity, device=experts_TK.device)
    places_EC = starts_E[:, None] + places_C
    filled_EC = places_EC < ends_E[:, None]
    choices_N = choices_R[places_EC.clamp_max_(choices_R.shape[0] - 1)].flatten()
    rank_R = _inverse(choices_R) - starts_E[experts_TK.flatten()]
    return RowOrder(
        choices_N,
        tokens=choices_N // experts_TK.shape[1],
        rows=(experts_TK.flatten() * capacity + rank_R.clamp_max(capacity - 1)).view(experts_TK.shape),
        ends=torch.arange(capacity, num_experts * capacity + 1, capacity, device=keys_R.device, dtype=torch.int32),
        kept=(rank_R < capacity).view(experts_TK.shape),
        filled=filled_EC.flatten(),
    )


def permute(x_TH: Tensor, order: RowOrder) -> Tensor:
    """Give each row its token: [N, H].

    The gradient of a token is the sum over its choices, gathered, so that it is the same in every run; what a
    grouped product left in the gradients of rows without a choice has no part in it.
    """
    function: Callable[..., Tensor] = _Permute.apply
    return function(x_TH, order.tokens, order.rows, order.kept)


def combine(y_NH: Tensor, probs_TK: Tensor, order: RowOrder) -> Tensor:
    """Sum up what the experts of each token gave, weighted: [T, H] in the dtype of ``y_NH``.

    Dropped choices count as zero, whatever their row contains, and so do the gradients of rows without a choice.
    Weights in the dtype of the rows make it one matrix product; others, float32 for example, are multiplied in theirs.
    Autocast changes none of this.
    """
    function: Callable[..., Tensor] = _Combine.apply
    with without_autocast(y_NH):
        return function(y_NH, probs_TK, order.choices, order.tokens, order.rows, order.kept, order.filled)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, tokens_N: Tensor, rows_TK: Tensor, kept_TK: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows_TK, kept_TK)
        return x_TH[tokens_N]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor, None, None, None]:
        return _choices(grad_outputs[0], *ctx.saved_tensors).sum(1), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        y_NH: Tensor,
        probs_TK: Tensor,
        choices_N: Tensor,
        tokens_N: Tensor,
        rows_TK: Tensor,
        kept_TK: Tensor | None,
        filled_N: Tensor | None,
    ) -> Tensor:
        y_TKH = _choices(y_NH, rows_TK, kept_TK)
        ctx.save_for_backward(y_TKH, probs_TK, choices_N, tokens_N, filled_N)
        return _weighted_sum(y_TKH, probs_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[Tensor | None, ...]:
        y_TKH, probs_TK, choices_N, tokens_N, filled_N = ctx.saved_tensors
        grad_TH: Tensor = grad_outputs[0]
        grad_y = grad_probs = None
        if ctx.needs_input_grad[0]:
            probs_N = probs_TK.flatten()[choices_N]
            if filled_N is not None:
                probs_N = probs_N.masked_fill_(~filled_N, 0.0)
            grad_y = (grad_TH[tokens_N] * probs_N[:, None]).to(y_TKH.dtype)
        if ctx.needs_input_grad[1]:
            grad_probs = torch.bmm(y_TKH, grad_TH[:, :, None]).squeeze(2).to(probs_TK.dtype)
        return grad_y, grad_probs, None, None, None, None, None


def _choices(rows_NH: Tensor, rows_TK: Tensor, kept_TK: Tensor | None) -> Tensor:
    """The rows of all choices, [T, K, H]; zero for those that were dropped."""
    chosen_TKH = rows_NH[rows_TK]
    # Filled, not multiplied: behind the last end a grouped product writes nothing, and memory may hold NaN.
    return chosen_TKH if kept_TK is None else chosen_TKH.masked_fill_(~kept_TK[..., None], 0.0)


def _weighted_sum(y_TKH: Tensor, probs_TK: Tensor) -> Tensor:
    if probs_TK.dtype is y_TKH.dtype:
        return torch.bmm(probs_TK[:, None, :], y_TKH).squeeze(1)
    return (y_TKH * probs_TK[..., None]).sum(1).to(y_TKH.dtype)


def _sorted_by_expert(experts_R: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Experts in rising order, and that order. In the smallest type that holds them: a sort passes over all bits."""
    key_type = torch.uint8 if num_experts < 256 else torch.int16 if num_experts < 2**15 else torch.int32
    keys_R, order_R = torch.sort(experts_R.to(key_type), stable=True)
    return keys_R, order_R


def _ends(keys_R: Tensor, num_experts: int) -> Tensor:
    """The place behind the last one of each expert, int32."""
    ids_E = torch.arange(num_experts, device=keys_R.device, dtype=keys_R.dtype)
    return torch.searchsorted(keys_R, ids_E, right=True, out_int32=True)


def _inverse(order_R: Tensor) -> Tensor:
    """The inverse of a permutation."""
    places_R = torch.arange(order_R.shape[0], device=order_R.device)
    return torch.empty_like(order_R).scatter_(0, order_R, places_R)


def _by_priority(
    experts_TK: Tensor, probs_TK: Tensor, num_experts: int, policy: TokenDropPolicy
) -> tuple[Tensor, Tensor]:
    """Experts in rising order, and all choices in that order, those first within an expert that are kept first."""
    experts_R = experts_TK.flatten()
    if policy == "position":
        return _sorted_by_expert(experts_R, num_experts)
    by_weight_R = torch.sort(probs_TK.detach().flatten(), descending=True, stable=True)[1]
    keys_R, order_R = _sorted_by_expert(experts_R[by_weight_R], num_experts)
    return keys_R, by_weight_R[order_R]
