"""Known faults around gradients: second derivatives, and results that share memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.strategies.attach.plain import HIDDEN, LAYERS, Stack, attached, built, inputs, train
from torch import Tensor, nn

from graphstep.errors import LifecycleError


class Smooth(nn.Sequential):
    """A layer with second derivatives."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())


def gradient_penalty(model: Stack, x: Tensor) -> Tensor:
    x.requires_grad_()
    (found,) = torch.autograd.grad(model.layers(x).sum(), x, create_graph=True)
    return found.square().sum()


def penalty_on_gradients(model: Stack, x: Tensor) -> Tensor:
    model(x).backward(create_graph=True)
    return torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum()


def constant_gradient(model: Stack, x: Tensor) -> Tensor:
    model.layers(x).mean().backward(create_graph=True)
    return torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum()


class Layers(Stack):
    def __init__(self) -> None:
        super().__init__(2, Smooth)
        self.layers = nn.Sequential(*self.layers)


@pytest.mark.parametrize("num_calls", [1, 2])
@pytest.mark.parametrize("penalty", [gradient_penalty, penalty_on_gradients, constant_gradient])
def test_second_derivatives_are_refused_and_never_dropped(
    device: torch.device, penalty: Callable[[Stack, Tensor], Tensor], num_calls: int
) -> None:
    """With several calls before one backward too, where autograd accumulates the gradients of the region."""
    model: Any = built(Layers, device)
    with attached(model, LAYERS) as manager:
        for step in range(2):
            torch.stack([model(inputs(device, step + n)) for n in range(num_calls)]).sum().backward()
            manager.end_step()
        with pytest.raises(LifecycleError, match="create_graph=True") as caught:
            penalty(model, inputs(device, 9)).backward()
        assert caught.value.where.startswith("layers.")
        assert "leave this module out" in (caught.value.fix or "")
        train(model, device, 2)
        assert all(row.num_replays for row in manager.report().rows)
