"""The end of a step, seen in the weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from graphstep.strategies.boundary import StepBoundary


@pytest.fixture
def linear(device: torch.device) -> nn.Linear:
    return nn.Linear(3, 3).to(device)


def train(linear: nn.Linear) -> None:
    linear(torch.ones(2, 3, device=linear.weight.device)).sum().backward()


def test_nothing_has_passed_before_a_step_has_begun(linear: nn.Linear) -> None:
    boundary = StepBoundary(linear.parameters())
    with torch.no_grad():
        linear.weight.add_(1)
    assert not any(boundary.has_passed() for _ in range(100))


OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "sgd, foreach": lambda parameters: torch.optim.SGD(parameters, 0.1, foreach=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.1),
    "adamw, foreach": lambda parameters: torch.optim.AdamW(parameters, 0.1, foreach=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_ends_the_step(linear: nn.Linear, name: str) -> None:
    optimizer = OPTIMIZERS[name](list(linear.parameters()))
    boundary = StepBoundary(linear.parameters())
    for _ in range(3):
        boundary.start()
        for _ in range(2):
            train(linear)
            assert not boundary.has_passed()
        optimizer.step()
        assert boundary.has_passed()
        optimizer.zero_grad()
        assert boundary.has_passed()
        boundary.clear()
        assert not boundary.has_passed()


def test_what_was_before_the_step_began_does_not_count(linear: nn.Linear) -> None:
    boundary = StepBoundary(linear.parameters())
    boundary.start()
    with torch.no_grad():
        linear.bias.mul_(2)
    assert boundary.has_passed()
    boundary.start()
    assert not boundary.has_passed()


def test_one_parameter_is_enough(linear: nn.Linear) -> None:
    boundary = StepBoundary(linear.parameters())
    boundary.start()
    with torch.no_grad():
        linear.bias.zero_()
    assert boundary.has_passed()


def test_backwards_gradients_and_evaluation_end_no_step(linear: nn.Linear) -> None:
    boundary = StepBoundary(linear.parameters())
    boundary.start()
    train(linear)
    linear.zero_grad()
    with torch.no_grad():
        linear(torch.ones(2, 3, device=linear.weight.device))
    linear.eval()
    assert not boundary.has_passed()


def test_frozen_parameters_do_not_count(linear: nn.Linear) -> None:
    linear.bias.requires_grad_(False)
    boundary = StepBoundary(linear.parameters())
    boundary.start()
    with torch.no_grad():
        linear.bias.zero_()
    assert not boundary.has_passed()


def write_through_data(linear: nn.Linear) -> None:
    linear.weight.data.add_(1)


def step_fused(linear: nn.Linear) -> None:
    train(linear)
    torch.optim.AdamW(linear.parameters(), fused=True).step()


@pytest.mark.parametrize("update", [write_through_data, step_fused])
def test_a_step_that_leaves_no_trace_is_over_some_time(linear: nn.Linear, update: Callable[[nn.Linear], None]) -> None:
    """These change no version, which is the optimizer's affair."""
    boundary = StepBoundary(linear.parameters())
    boundary.start()
    update(linear)
    num_asked = next(count for count in range(1, 1000) if boundary.has_passed())
    assert num_asked <= 128
    boundary.start()
    assert not boundary.has_passed()


def test_a_model_without_parameters_has_no_end_but_that(device: torch.device) -> None:
    boundary = StepBoundary([])
    boundary.start()
    assert not boundary.has_passed()
    assert any(boundary.has_passed() for _ in range(1000))
