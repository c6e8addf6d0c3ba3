"""The order of rows: sorted by expert, dropped, padded, and back."""

from __future__ import annotations

import itertools
from typing import get_args

import pytest
import torch
from torch import Tensor

from graphstep.config.choices import TokenDropPolicy
from graphstep.models.moe.permutation import (
    RowOrder,
    combine,
    expert_capacity,
    permute,
    row_order,
    row_order_by_capacity,
    row_order_padded,
)

TOKENS, EXPERTS, CHOSEN, HIDDEN = 14, 5, 2, 6
ROUTINGS = ("random", "all to one", "one empty", "cyclic")


def routed(routing: str) -> tuple[Tensor, Tensor]:
    """Experts and weights of tokens, the latter with ties."""
    probs = torch.rand(TOKENS, CHOSEN).mul(4).round().div(4) + 0.1
    if routing == "all to one":
        return torch.tensor([3, 1]).repeat(TOKENS, 1), probs
    if routing == "cyclic":
        return torch.arange(TOKENS * CHOSEN).view(TOKENS, CHOSEN) % EXPERTS, probs
    scores = torch.rand(TOKENS, EXPERTS)
    if routing == "one empty":
        scores[:, 2] = -1.0
    return scores.topk(CHOSEN).indices, probs


def kept_by_hand(experts: Tensor, probs: Tensor, capacity: int, policy: str) -> Tensor:
    kept = torch.zeros(TOKENS, CHOSEN, dtype=torch.bool)
    for expert in range(EXPERTS):
        choices = [(t, k) for t, k in itertools.product(range(TOKENS), range(CHOSEN)) if experts[t, k] == expert]
        if policy == "probs":
            choices.sort(key=lambda choice: -probs[choice].item())
        for choice in choices[:capacity]:
            kept[choice] = True
    return kept


def check(order: RowOrder, experts: Tensor, kept: Tensor) -> None:
    """Each kept choice has one row, within its expert's, that points back to it."""
    starts = [0, *order.ends.tolist()[:-1]]
    for token, k in itertools.product(range(TOKENS), range(CHOSEN)):
        if not kept[token, k]:
            continue
        row, expert = int(order.rows[token, k]), int(experts[token, k])
        assert starts[expert] <= row < order.ends[expert]
        assert order.choices[row] == token * CHOSEN + k
        assert order.tokens[row] == token
        assert order.filled is None or order.filled[row]
    assert torch.equal(order.tokens, order.choices // CHOSEN)
    assert order.ends.dtype is torch.int32
    if order.filled is not None and order.kept is not None:
        assert torch.equal(order.kept, kept)
        assert order.filled.sum() == kept.sum()


@pytest.mark.parametrize("routing", ROUTINGS)
def test_dropless(routing: str) -> None:
    experts, _ = routed(routing)
    order = row_order(experts, EXPERTS)
    check(order, experts, torch.ones(TOKENS, CHOSEN, dtype=torch.bool))
    assert order.kept is None
    assert torch.equal(order.ends, torch.bincount(experts.flatten(), minlength=EXPERTS).cumsum(0).int())
    in_order = experts.flatten()[order.choices]
    assert torch.equal(order.choices, experts.flatten().sort(stable=True).indices)
    assert torch.equal(in_order, in_order.sort().values)


@pytest.mark.parametrize("num_experts", [200, 255, 256, 300, 40000])
def test_many_experts(num_experts: int) -> None:
    experts = torch.randint(num_experts, (50, 3))
    experts[0] = num_experts - 1
    order = row_order(experts, num_experts)
    assert torch.equal(order.choices, experts.flatten().sort(stable=True).indices)
    assert torch.equal(order.ends, torch.bincount(experts.flatten(), minlength=num_experts).cumsum(0).int())


def test_numbers_behind_the_last_expert_come_last() -> None:
    experts = torch.tensor([[2, 0], [1, 2], [0, 1]])
    order = row_order(experts, 2)
    assert order.ends.tolist() == [2, 4]
    assert sorted(order.choices[4:].tolist()) == [0, 3]


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("policy", get_args(TokenDropPolicy))
@pytest.mark.parametrize("capacity", [1, 3, TOKENS])
@pytest.mark.parametrize("padded", [False, True])
def test_capacity(padded: bool, capacity: int, policy: TokenDropPolicy, routing: str) -> None:
    experts, probs = routed(routing)
    make = row_order_padded if padded else row_order_by_capacity
    order = make(experts, probs, EXPERTS, capacity, policy)
    kept = kept_by_hand(experts, probs, capacity, policy)
    check(order, experts, kept)
    if padded:
        assert order.ends.tolist() == [(expert + 1) * capacity for expert in range(EXPERTS)]
        assert order.choices.shape == (EXPERTS * capacity,)
    else:
        assert order.ends[-1] == kept.sum()
        assert order.choices.sort().values.tolist() == list(range(TOKENS * CHOSEN))


def test_capacity_in_rows() -> None:
    assert expert_capacity(512, 32, 4, 1.0) == 64
    assert expert_capacity(10, 4, 1, 1.0) == 3
    assert expert_capacity(10, 4, 1, 1.5) == 4
    assert expert_capacity(10, 2, 2, 8.0) == 10


ORDERS = ("dropless", "drop", "pad")


def ordered(kind: str, experts: Tensor, probs: Tensor) -> RowOrder:
    if kind == "dropless":
        return row_order(experts, EXPERTS)
    make = row_order_padded if kind == "pad" else row_order_by_capacity
    return make(experts, probs.detach(), EXPERTS, 4, "probs")


def by_hand(x: Tensor, probs: Tensor, experts: Tensor, order: RowOrder, factors: Tensor) -> Tensor:
    kept = torch.ones_like(experts, dtype=torch.bool) if order.kept is None else order.kept
    return torch.stack(
        [
            sum(
                (x[t] * factors[experts[t, k]] * probs[t, k] for k in range(CHOSEN) if kept[t, k]),
                torch.zeros(HIDDEN, dtype=x.dtype),
            )
            for t in range(TOKENS)
        ]
    )


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", ORDERS)
@pytest.mark.parametrize("probs_dtype", [torch.float64, torch.float32])
def test_there_and_back(probs_dtype: torch.dtype, kind: str, routing: str) -> None:
    """Experts that multiply by a number of their own, and leave NaN where they write nothing, in both directions."""
    experts, probs = routed(routing)
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    probs = probs.to(probs_dtype).requires_grad_()
    factors = torch.arange(1.0, EXPERTS + 1, dtype=torch.float64)
    order = ordered(kind, experts, probs)
    of_rows = factors[experts.flatten()[order.choices]][:, None]
    unwritten = torch.arange(order.choices.shape[0]) >= order.ends[-1]
    y = combine(Leaves.apply(permute(x, order), of_rows, unwritten), probs, order)
    expected = by_hand(x, probs, experts, order, factors)
    torch.testing.assert_close(y, expected, check_dtype=False)
    upstream = torch.randn_like(y)
    mine = torch.autograd.grad(y, (x, probs), upstream)
    torch.testing.assert_close(mine, torch.autograd.grad(expected, (x, probs), upstream))


class Leaves(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, factor: Tensor, unwritten: Tensor) -> Tensor:
        ctx.save_for_backward(factor, unwritten)
        return (x * factor).masked_fill(unwritten[:, None], float("nan"))

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, None, None]:
        factor, unwritten = ctx.saved_tensors  # type: ignore[attr-defined]
        return (grads[0] * factor).masked_fill(unwritten[:, None], float("nan")), None, None


@pytest.mark.parametrize("kind", ORDERS)
def test_half_precision_weights_are_one_product(kind: str) -> None:
    experts, probs = routed("random")
    order = ordered(kind, experts, probs)
    y = torch.randn(order.choices.shape[0], HIDDEN, dtype=torch.bfloat16)
    narrow = combine(y, probs.bfloat16(), order)
    assert narrow.dtype is torch.bfloat16
    torch.testing.assert_close(narrow.double(), combine(y.double(), probs.double(), order), rtol=2e-2, atol=2e-2)
