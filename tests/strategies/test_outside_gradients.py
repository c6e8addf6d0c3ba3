"""Which results get a gradient from the caller: all ways in which gradients can meet there, eager twins beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from graphstep.strategies.outside_gradients import note_outside

Loss = Callable[[Sequence[Tensor]], Tensor]
Call = Callable[[Tensor], Sequence[Tensor]]


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, number: float, x: Tensor) -> Tensor:
        ctx.number = number
        return x * number

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        return None, gradients[0] * ctx.number


def once(x: Tensor) -> Sequence[Tensor]:
    first = x.tanh()
    return first, first.exp().sum()


def often(x: Tensor) -> Sequence[Tensor]:
    first = x.tanh()
    return first, (first * first + first.sin() + Scaled.apply(0.5, first)).sum()


def in_a_row(x: Tensor) -> Sequence[Tensor]:
    first = x.tanh()
    second = first.sin() + first
    return first, second, (second.exp() + second).sum()


def unchanged(x: Tensor) -> Sequence[Tensor]:
    return x, x.exp().sum()


def twice(x: Tensor) -> Sequence[Tensor]:
    first = x.tanh()
    return first, first, first.exp().sum()


def of_one_node(x: Tensor) -> Sequence[Tensor]:
    first, second = x.chunk(2, -1)
    return first, second, first.exp().sum()


def recomputed(x: Tensor) -> Sequence[Tensor]:
    first = x.tanh()
    return first, checkpoint(lambda y: y.exp() + y.sin(), first, use_reentrant=False).sum()


def reentrant(x: Tensor) -> Sequence[Tensor]:
    first = x.tanh()
    return first, checkpoint(lambda y: y.exp() + y.sin(), first, use_reentrant=True).sum()


def with_a_leaf(x: Tensor) -> Sequence[Tensor]:
    first = x.tanh()
    leaf = torch.ones(6, device=x.device, requires_grad=True)
    return first, leaf, (first * leaf).sum()


def independent(x: Tensor) -> Sequence[Tensor]:
    return x.tanh(), x.exp().sum()


CALLS: Sequence[Call] = (
    *(once, often, in_a_row, unchanged, twice, of_one_node, recomputed, reentrant, independent),
    with_a_leaf,
)
LOSSES: Mapping[str, Loss] = {
    "last": lambda results: results[-1] * 2,
    "first": lambda results: results[0].square().sum(),
    "both": lambda results: results[-1] + results[0].square().sum() + results[0].cos().sum(),
    "zero": lambda results: results[-1] + 0 * results[0].sum(),
}
EXPECTED: Mapping[str, Mapping[Call, set[int]]] = {
    "last": {in_a_row: {2}, twice: {2}, of_one_node: {2}, with_a_leaf: {1, 2}},
    "first": {twice: {0, 1}, with_a_leaf: {0, 1}},
    "both": {in_a_row: {0, 2}, twice: {0, 1, 2}, of_one_node: {0, 2}, with_a_leaf: {0, 1, 2}},
    "zero": {in_a_row: {0, 2}, twice: {0, 1, 2}, of_one_node: {0, 2}, with_a_leaf: {0, 1, 2}},
}
DEFAULT: Mapping[str, set[int]] = {"last": {1}, "first": {0}, "both": {0, 1}, "zero": {0, 1}}


def gradients(
    call: Call, run: Callable[[Sequence[Tensor]], Any], device: torch.device, *, notes: bool
) -> tuple[list[Tensor], set[int]]:
    """Of a weight, and of all results as hooks of the caller see them."""
    weight = torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    x = torch.linspace(-1, 1, 24, device=device).reshape(4, 6) @ weight
    results = call(x)
    used = note_outside(results, [x.grad_fn]) if notes else set()
    seen: list[Tensor] = []

    def see(gradient: Tensor | None) -> None:
        if gradient is not None:
            assert type(gradient) is Tensor
            seen.append(gradient.clone())

    for each in dict.fromkeys(results):
        each.register_hook(see)
        each.retain_grad()
    run(results)
    kept = [each.grad for each in (*results, weight) if each.grad is not None]
    assert all(type(each) is Tensor for each in kept)
    return [*seen, *kept], used


def insist_on_the_same_bits(call: Call, run: Callable[[Sequence[Tensor]], Any], device: torch.device) -> set[int]:
    expected, _ = gradients(call, run, device, notes=False)
    found, used = gradients(call, run, device, notes=True)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))
    return used


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("loss", LOSSES)
def test_a_backward(device: torch.device, call: Call, loss: str) -> None:
    used = insist_on_the_same_bits(call, lambda results: LOSSES[loss](results).backward(), device)
    assert used == EXPECTED[loss].get(call, DEFAULT[loss])


@pytest.mark.parametrize("call", [once, often])
def test_several_roots(device: torch.device, call: Call) -> None:
    def run(results: Sequence[Tensor]) -> None:
        torch.autograd.backward([results[1], results[0]], [None, torch.ones_like(results[0])])

    assert insist_on_the_same_bits(call, run, device) == {0, 1}


def test_a_second_backward_of_the_same_graph(device: torch.device) -> None:
    def run(results: Sequence[Tensor]) -> None:
        results[1].backward(retain_graph=True)
        (results[0].sum() + results[1]).backward()

    assert insist_on_the_same_bits(often, run, device) == {0, 1}


def test_second_derivatives(device: torch.device) -> None:
    """Marks would end their history: there all that has a gradient counts as used."""

    def run(results: Sequence[Tensor]) -> None:
        (found,) = torch.autograd.grad(results[1], results[0], create_graph=True)
        found.square().sum().backward()

    assert insist_on_the_same_bits(often, run, device) >= {1}


def test_hooks_of_the_call_itself(device: torch.device) -> None:
    """They come first, and what they make of a gradient is plain: it counts as used."""

    def call(x: Tensor) -> Sequence[Tensor]:
        first = x.tanh()
        first.register_hook(lambda gradient: gradient * 2)
        return first, first.exp().sum()

    assert insist_on_the_same_bits(call, lambda results: results[1].backward(), device) == {0, 1}


def test_a_result_that_is_written_afterwards(device: torch.device) -> None:
    def run(results: Sequence[Tensor]) -> None:
        results[0].mul_(3)
        (results[0].sum() + results[1]).backward()

    def call(x: Tensor) -> Sequence[Tensor]:
        first = x + 1
        return first, (first * 2).sum()

    assert insist_on_the_same_bits(call, run, device) == {0, 1}


def test_sparse_gradients(device: torch.device) -> None:
    table = torch.ones(4, 3, device=device, requires_grad=True)

    def run(notes: bool) -> tuple[Tensor, set[int]]:
        table.grad = None
        first = table * 1
        second = torch.nn.functional.embedding(torch.tensor([1, 2], device=device), first, sparse=True).sum()
        used = note_outside([first, second], []) if notes else set()
        second.backward()
        return table.grad.to_dense(), used

    assert torch.equal(run(False)[0], run(True)[0])
    assert run(True)[1] == {0, 1}
