"""Detached tensors that a region leaves in attributes, and those who hold them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.plain import HIDDEN, LAYERS, Stack, attached, built, inputs, num_replays
from torch import Tensor, nn


class Leaves(nn.Module):
    """Leaves a statistic, its result, its argument and its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.norm: Tensor | None = None
        self.seen: dict[str, Any] = {}
        self.latest: list[Any] = [None]

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.norm = y.detach().norm()
        self.seen["result"], self.seen["weight"] = y.detach(), self.linear.weight.detach()
        self.latest[0] = x.detach()
        return y


def left_by(model: nn.Module) -> list[Tensor]:
    layers: Any = model.layers
    return [t for layer in layers for t in (layer.norm, layer.seen["result"], layer.latest[0])]


def history(model: nn.Module, device: torch.device, num_microbatches: int, look: Callable[[int], Any]) -> list[Tensor]:
    """What was left after each forward, held to the end of training."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept: list[Tensor] = []
    for step in range(5):
        optimizer.zero_grad()
        losses = []
        for microbatch in range(num_microbatches):
            losses.append(model(inputs(device, step * num_microbatches + microbatch)))
            kept += left_by(model)
        torch.stack(losses).sum().backward()
        kept += left_by(model)
        optimizer.step()
        del losses
        look(step)
    return kept


@pytest.mark.parametrize("merge_layers", [1, 0])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_s6_a_tensor_left_in_an_attribute_and_held(
    device: torch.device, num_microbatches: int, merge_layers: int
) -> None:
    build = partial(Stack, 2, Leaves)
    expected = history(built(build, device), device, num_microbatches, lambda step: None)
    model = built(build, device)
    with attached(model, LAYERS, merge_layers=merge_layers) as manager:
        found = history(model, device, num_microbatches, lambda step: None)
        assert num_replays(manager) == 2 * 4 * num_microbatches
        layers: Any = model.layers
        # The weight's memory is the model's own.
        assert layers[0].seen["weight"].data_ptr() == layers[0].linear.weight.data_ptr()
    assert all(map(torch.equal, expected, found))


def test_s6_a_capture_leaves_the_value_of_the_step_before(device: torch.device) -> None:
    build = partial(Stack, 2, Leaves)
    model = built(build, device)
    with attached(model, LAYERS) as manager:
        before: list[Tensor] = []

        def look(step: int) -> None:
            if step == 0:
                before.extend(left_by(model))
                manager.end_step()
                assert all(now is then for now, then in zip(left_by(model), before, strict=True))

        history(model, device, 1, look)
        assert num_replays(manager) == 2 * 4
    assert manager.report().pool_bytes == 0
