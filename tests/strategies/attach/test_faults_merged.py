"""Writes between the calls of layers that are launched together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests.strategies.attach.plain import HIDDEN, LAYERS, Stack, attached, built, inputs, num_replays, reasons, same
from torch import Tensor, nn

from graphstep.errors import LifecycleError


class Scaled(nn.Module):
    """Reads a buffer, and a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("scale", torch.ones(()))
        self.plain: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.linear(x)) * self.scale
        return result * self.plain[0] if self.plain else result


class ScaledByAttribute(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        if not self.plain:
            self.plain.append(torch.ones((), device=x.device))
        return super().forward(x)


def into_buffer(layer: nn.Module, number: int) -> None:
    layer.scale.fill_(1.0 + 0.1 * (number % 7))


def into_weight(layer: nn.Module, number: int) -> None:
    with torch.no_grad():
        layer.linear.weight.mul_(0.9)


def into_attribute(layer: nn.Module, number: int) -> None:
    if layer.plain:
        layer.plain[0].fill_(1.0 + 0.1 * (number % 7))


@pytest.mark.parametrize("merge_layers", [1, 2, 0])
@pytest.mark.parametrize("write", [into_buffer, into_weight, into_attribute])
@pytest.mark.parametrize("when", ["before each", "before the last", "two calls ahead"])
def test_s3_a_write_between_two_layers_of_a_graph(
    device: torch.device, write: Callable[[nn.Module, int], None], merge_layers: int, when: str
) -> None:
    """The layers after it run with what was written."""
    numbers = {"calls": 0}

    def call(layer: nn.Module, x: Tensor, index: int) -> Tensor:
        numbers["calls"] += 1
        if when == "before each" or (when == "before the last" and index == 2):
            write(layer, numbers["calls"])
        result: Tensor = layer(x)
        return result

    def restart(step: int) -> None:
        numbers["calls"] = numbers["calls"] if step else 0

    def build() -> Stack:
        model = Stack(3, ScaledByAttribute if write is into_attribute else Scaled, call)
        if when == "two calls ahead":
            middle, last = model.layers[1:]
            middle.register_forward_pre_hook(lambda *_: write(last, numbers["calls"]))
        return model

    found = same(device, build, num_microbatches=1, num_steps=7, config={"merge_layers": merge_layers}, before=restart)
    if merge_layers == 0:
        assert found["written between merged layers"] > 0


def test_s3_no_write_no_reason(device: torch.device) -> None:
    build = partial(Stack, 3, Scaled)
    found = same(device, build, replays=3 * 4, num_microbatches=1, config={"merge_layers": 0})
    assert found == {"observed": 3}


class Shifted(nn.Module):
    """Its result is needed for its backward, what it reads is not."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("shift", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + self.shift)


def test_s3_a_layer_to_be_computed_again_has_been_written_to(device: torch.device) -> None:
    """Eager execution has kept the result; what computes it again would get another one."""
    model = built(partial(Stack, 2, Shifted), device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, LAYERS, merge_layers=0) as manager:
        for step in range(3):
            optimizer.zero_grad()
            model(inputs(device, step)).backward()
            optimizer.step()
        assert num_replays(manager) == 4
        alone = model.layers[0](model.inp(inputs(device, 9)))
        model.layers[0].shift.fill_(1.0)
        with pytest.raises(LifecycleError, match="written between the forward and the backward"):
            alone.sum().backward()
    assert reasons(manager).keys() == {"observed"}
