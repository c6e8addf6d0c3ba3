"""Gradients go where the training loop reads them, hooks fire, and nobody is left with static memory in hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.capture.pairs import call, captured
from torch import Tensor, nn

from graphstep.capture.session import GraphSession


@pytest.fixture
def linear(device: torch.device) -> nn.Linear:
    return nn.Linear(3, 3).to(device)


def inputs(device: torch.device, num: int = 3) -> list[Tensor]:
    return [torch.randn(2, 3, device=device).requires_grad_() for _ in range(num)]


def eager_gradients(linear: nn.Linear, xs: list[Tensor]) -> dict[str, Tensor]:
    twin = nn.Linear(3, 3).to(linear.weight.device)
    twin.load_state_dict(linear.state_dict())
    for x in xs:
        twin(x.detach()).square().sum().backward()
    return {name: parameter.grad for name, parameter in twin.named_parameters()}


def test_accumulation_over_microbatches(session: GraphSession, device: torch.device, linear: nn.Linear) -> None:
    """Gradients of earlier microbatches are not lost."""
    xs = inputs(device)
    pair = captured(session, linear, xs[0])
    for x in xs:
        call(pair, x).square().sum().backward()
    for name, expected in eager_gradients(linear, xs).items():
        assert torch.equal(linear.get_parameter(name).grad, expected)


def test_leaf_inputs_own_their_gradients(session: GraphSession, device: torch.device, linear: nn.Linear) -> None:
    """For inputs: the gradient of one call survives the next, and two calls add up."""
    xs = inputs(device)
    pair = captured(session, linear, xs[0])
    call(pair, xs[0]).square().sum().backward()
    first = xs[0].grad.clone()
    call(pair, xs[1]).square().sum().backward()
    assert torch.equal(xs[0].grad, first)
    assert xs[0].grad.data_ptr() != xs[1].grad.data_ptr()
    call(pair, xs[0]).square().sum().backward()
    assert torch.equal(xs[0].grad, first * 2)


def test_gradients_of_inner_tensors_can_be_kept(session: GraphSession, device: torch.device, linear: nn.Linear) -> None:
    xs = inputs(device)
    pair = captured(session, linear, xs[0])
    kept: list[Tensor] = []
    for x in xs:
        hidden = x * 2
        hidden.retain_grad()
        hidden.register_hook(kept.append)
        call(pair, hidden).square().sum().backward()
        kept.append(hidden.grad)
    expected = []
    for x in xs:
        hidden = (x * 2).detach().requires_grad_()
        expected += [torch.autograd.grad(linear(hidden).square().sum(), hidden)[0]] * 2
    assert all(map(torch.equal, kept, expected))


@pytest.mark.parametrize("how", ["none", "zeros", "replaced", "a view"])
def test_whatever_the_loop_does_to_grad(
    session: GraphSession, device: torch.device, linear: nn.Linear, how: str
) -> None:
    xs = inputs(device)
    pair = captured(session, linear, xs[0])
    flat = torch.zeros(12, device=device)
    for x in xs:
        linear.zero_grad(set_to_none=how != "zeros")
        if how == "replaced":
            linear.weight.grad = torch.zeros(3, 3, device=device)
        if how == "a view":
            linear.weight.grad = flat[:9].view(3, 3).zero_()
        call(pair, x).square().sum().backward()
        for name, expected in eager_gradients(linear, [x]).items():
            assert torch.equal(linear.get_parameter(name).grad, expected)


def test_main_grad_is_where_they_go(session: GraphSession, device: torch.device) -> None:
    linear = nn.Linear(3, 3).to(device).bfloat16()
    xs = [x.detach().bfloat16().requires_grad_() for x in inputs(device)]
    for parameter in linear.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # type: ignore[attr-defined]
    pair = captured(session, linear, xs[0])
    expected = [torch.zeros(3, 3, device=device), torch.zeros(3, device=device)]
    for x in xs:
        call(pair, x).square().sum().backward()
        found = torch.autograd.grad(linear(x).square().sum(), list(linear.parameters()))
        expected = [sum_ + gradient.float() for sum_, gradient in zip(expected, found, strict=True)]
    mains: list[Any] = [parameter.main_grad for parameter in linear.parameters()]  # type: ignore[attr-defined]
    assert all(map(torch.equal, mains, expected))
    assert all(parameter.grad is None for parameter in linear.parameters())


@pytest.mark.parametrize("with_main_grad", [False, True])
def test_hooks_after_accumulation_fire_once_a_backward(
    session: GraphSession, device: torch.device, linear: nn.Linear, with_main_grad: bool
) -> None:
    if with_main_grad:
        for parameter in linear.parameters():
            parameter.main_grad = torch.zeros_like(parameter)  # type: ignore[attr-defined]
    fired: list[Any] = []
    linear.weight.register_post_accumulate_grad_hook(fired.append)
    xs = inputs(device)
    pair = captured(session, linear, xs[0])
    assert fired == []
    for count, x in enumerate(xs, 1):
        call(pair, x).sum().backward()
        assert len(fired) == count
        assert fired[-1] is linear.weight


def test_an_optimizer_in_a_hook_sees_the_whole_gradient(
    session: GraphSession, device: torch.device, linear: nn.Linear
) -> None:
    seen: list[Tensor] = []

    def take(parameter: Tensor) -> None:
        assert parameter.grad is not None
        seen.append(parameter.grad.clone())
        parameter.grad = None

    linear.weight.register_post_accumulate_grad_hook(take)
    xs = inputs(device)
    pair = captured(session, linear, xs[0])
    for x in xs:
        call(pair, x).square().sum().backward()
    assert all(torch.equal(g, eager_gradients(linear, [x])["weight"]) for g, x in zip(seen, xs, strict=True))


def test_hooks_on_the_gradient_fire_and_change_it(
    session: GraphSession, device: torch.device, linear: nn.Linear
) -> None:
    fired: list[float] = []

    def scale(gradient: Tensor) -> Tensor:
        fired.append(1.0)
        return gradient * len(fired)

    linear.weight.register_hook(scale)
    xs = inputs(device)
    pair = captured(session, linear, xs[0])
    assert fired == []
    for count, x in enumerate(xs, 1):
        linear.zero_grad()
        call(pair, x).square().sum().backward()
        assert len(fired) == count
        assert torch.equal(linear.weight.grad, eager_gradients(linear, [x])["weight"] * count)


def test_a_hook_on_the_gradient_that_comes_late_is_noticed(
    session: GraphSession, device: torch.device, linear: nn.Linear
) -> None:
    pair = captured(session, linear, inputs(device)[0])
    assert not pair.has_new_hook()
    handle = linear.bias.register_hook(lambda gradient: gradient * 2)
    assert pair.has_new_hook()
    handle.remove()
    assert not pair.has_new_hook()


class NoGradient(torch.autograd.Function):
    """A backward that leaves the weight's gradient to others."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def test_a_parameter_without_gradient_stays_without(session: GraphSession, device: torch.device) -> None:
    """Weight decay passes over parameters whose gradient is ``None``."""
    weight, unused = (nn.Parameter(torch.ones(3, device=device)) for _ in range(2))
    x = torch.randn(3, device=device, requires_grad=True)
    pair = captured(session, lambda x: NoGradient.apply(x, weight) + (unused * 2).detach(), x)  # type: ignore[no-untyped-call]
    call(pair, x).sum().backward()
    assert weight.grad is None
    assert unused.grad is None
    assert torch.equal(x.grad, torch.ones_like(x))


def test_a_frozen_parameter_stays_without_gradient(
    session: GraphSession, device: torch.device, linear: nn.Linear
) -> None:
    linear.bias.requires_grad_(False)
    xs = inputs(device)
    pair = captured(session, linear, xs[0])
    call(pair, xs[1]).square().sum().backward()
    assert linear.bias.grad is None
    assert torch.equal(linear.weight.grad, eager_gradients(linear, xs[1:2])["weight"])


def test_parts_of_a_shared_parameter_are_summed_before_they_are_added(
    session: GraphSession, device: torch.device
) -> None:
    weight = nn.Parameter(torch.randn(3, 3, device=device))
    xs = [torch.randn(2, 3, device=device).requires_grad_() for _ in range(4)]
    through = frozenset([id(weight)])
    pairs = [captured(session, lambda x: x @ weight, xs[0], through_autograd=through) for _ in range(3)]
    found = []
    for functions in ([lambda x: x @ weight] * 3, [lambda x, p=pair: call(p, x) for pair in pairs]):
        weight.grad = None
        for x in xs:
            hidden = x * 1
            for function in functions:
                hidden = function(hidden)
            hidden.square().sum().backward()
        found.append(weight.grad.clone())
    assert torch.equal(*found)
