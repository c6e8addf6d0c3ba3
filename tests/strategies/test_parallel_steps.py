"""Whole steps with branches for gradients: what a capture does with them, equal to eager; and when there are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import graphstep
from graphstep.capture.session import GraphSession
from graphstep.engine import TapeEngine
from graphstep.strategies.full_iteration import FullCudaGraphWrapper

HIDDEN, NUM_STEPS = 8, 7


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(HIDDEN)) for _ in range(40))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + functional.gelu(layer(x))
        for scale in self.scales:
            x = x * scale
        return x.square().mean()


class CountedBranch:
    """Does its work at once, as the tape has one order, and counts it."""

    is_here = True
    may_multiply = True
    width = 3

    def __init__(self) -> None:
        self.num_pending = self.num_run = self.num_spread = self.num_unseen = 0

    def run(self, work: Callable[[], Any], keep: Sequence[object]) -> Any:
        self.num_run += 1
        self.num_pending = min(self.num_pending + 1, 8)
        return work()

    def join(self) -> None:
        self.num_pending = 0

    def num_nodes(self) -> int:
        return self.num_unseen

    def spread(self, works: Sequence[Callable[[], object]]) -> None:
        self.num_spread += 1
        for work in works:
            work()


@pytest.fixture
def branches(monkeypatch: pytest.MonkeyPatch) -> list[CountedBranch]:
    """One for each capture that asks for one."""
    made: list[CountedBranch] = []

    def branch(_: TapeEngine) -> CountedBranch:
        made.append(CountedBranch())
        return made[-1]

    monkeypatch.setattr(TapeEngine, "branch", branch)
    return made


class Unseen(torch.autograd.Function):
    """Launches something that is no operation of torch, while gradients are pending."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, branches: list[CountedBranch]) -> Tensor:
        ctx.branches = branches
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        for each in ctx.branches:
            each.num_unseen += 1
        return gradient, None


def trained(model: Model, *, zeroes_in_place: bool, unseen: list[CountedBranch] | None = None, **options: Any) -> Any:
    """Steps with clipping and AdamW, captured if there are options; gradients, parameters and losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-7, fused=True)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=not zeroes_in_place)
        y = x if unseen is None else Unseen.apply(model.layers[0](x), unseen)
        loss: Tensor = model(y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach()

    run = graphstep.graph_step(step, modules=[model], **options) if options else step
    drawn = torch.Generator().manual_seed(0)
    losses = [run(torch.randn(3, 5, HIDDEN, generator=drawn)) for _ in range(NUM_STEPS)]
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    if options:
        run.close()
    return [*grads, *(p.detach().clone() for p in model.parameters()), *losses]


def built() -> Model:
    torch.manual_seed(0)
    return Model()


@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("zeroes_in_place", [False, True])
def test_steps_are_equal(zeroes_in_place: bool, gathers: bool, branches: list[CountedBranch]) -> None:
    expected = trained(built(), zeroes_in_place=zeroes_in_place)
    found = trained(built(), zeroes_in_place=zeroes_in_place, parallel_gradients=True, gather_gradients=gathers)
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))
    (branch,) = branches
    assert branch.num_pending == 0
    assert branch.num_spread == 1, "the launches of AdamW"
    if not zeroes_in_place:
        assert branch.num_run == 48, "weights and biases of the layers, and scales"
    elif gathers:
        assert branch.num_run > 48, "zeroes and additions too"


def test_without_the_option_there_are_none(branches: list[CountedBranch]) -> None:
    expected = trained(built(), zeroes_in_place=True)
    found = trained(built(), zeroes_in_place=True, gather_gradients=True)
    assert all(map(torch.equal, found, expected))
    assert branches == []


@pytest.mark.parametrize(("zeroes_in_place", "number"), [(False, 2), (True, 2)])
def test_kernels_of_others_in_the_pass(zeroes_in_place: bool, number: int, branches: list[CountedBranch]) -> None:
    """They may meet what is pending: first zeroes are taken from the branch, then all that is on it."""
    expected = trained(built(), zeroes_in_place=zeroes_in_place, unseen=[])
    found = trained(built(), zeroes_in_place=zeroes_in_place, unseen=branches, parallel_gradients=True)
    assert all(map(torch.equal, found, expected))
    assert len(branches) == number
    assert all(branch.num_unseen for branch in branches)


def test_a_forward_alone_needs_none(branches: list[CountedBranch]) -> None:
    model = built()
    batches = [torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(n)) for n in range(6)]

    def forward_backward(
        *, data_iterator: Any, model: nn.Module, num_microbatches: int, forward_only: bool = False
    ) -> Tensor:
        loss: Tensor = model(next(data_iterator))
        if not forward_only:
            loss.backward()
        return loss.detach()

    session = GraphSession("cpu")
    wrapper = FullCudaGraphWrapper(forward_backward, model=model, session=session, parallel_gradients=True)
    for batch in batches:
        loss = wrapper.forward_backward(data_iterator=iter([batch]), num_microbatches=1, forward_only=True)
        assert torch.equal(loss, model(batch))
    assert branches == []
    session.close()
