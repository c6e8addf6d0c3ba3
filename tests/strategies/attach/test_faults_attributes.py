"""Known faults around attributes and hooks that change within a step: each call sees those of its moment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.plain import (
    HIDDEN,
    LAYERS,
    Stack,
    Trace,
    attached,
    built,
    inputs,
    num_replays,
    reasons,
    snapshot,
)
from tests.strategies.runs import differences
from torch import Tensor, nn

from graphstep.capture.reasons import EagerReason

Touch = Callable[[nn.Module, int, int, int], Any]
"""Called with a layer, its index, the step and the microbatch just before a call."""


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.scale = 1.0
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x)) * self.scale
        return y if self.table is None else y * self.table


def run(model: Any, device: torch.device, touch: Touch, *, num_steps: int = 8, num_microbatches: int = 1) -> Trace:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace: Trace = []
    for step in range(num_steps):
        optimizer.zero_grad()
        losses = []
        for microbatch in range(num_microbatches):
            x = model.inp(inputs(device, step * num_microbatches + microbatch))
            for index, layer in enumerate(model.layers):
                after = touch(layer, index, step, microbatch)
                x = layer(x)
                if after is not None:
                    after()
            losses.append(model.out(x).square().mean())
        torch.stack(losses).sum().backward()
        trace.append(snapshot(model, device, torch.stack(losses).detach()))
        optimizer.step()
        del losses, x
    return trace


def once_later(layer: Any, index: int, step: int, _microbatch: int) -> Any:
    """Another value for one call of one layer, and then the old one."""
    if index == 1 and step >= 3:
        layer.scale = 0.5
        return lambda: setattr(layer, "scale", 1.0)
    return None


def from_then_on(layer: Any, _index: int, step: int, _microbatch: int) -> None:
    layer.scale = 1.0 if step < 3 else 0.5


def by_microbatch(layer: Any, _index: int, step: int, microbatch: int) -> None:
    layer.scale = 1.0 if step < 3 or microbatch == 0 else 0.5


def by_step(layer: Any, _index: int, step: int, _microbatch: int) -> None:
    layer.scale = 1.0 + step % 2


def fresh_tensor(layer: Any, _index: int, step: int, _microbatch: int) -> None:
    layer.table = torch.full((HIDDEN,), 1.0 + step, device=layer.linear.weight.device)


def inner_hook(layer: Any, index: int, step: int, _microbatch: int) -> Any:
    if index == 1 and step >= 3:
        return layer.linear.register_forward_hook(lambda _module, _arguments, result: result * 2).remove
    return None


CHANGES: dict[str, tuple[Touch, int]] = {
    "one layer for one call": (once_later, 1),
    "each layer before its call": (from_then_on, 1),
    "each microbatch": (by_microbatch, 2),
    "each step in turn": (by_step, 1),
    "a new tensor each step": (fresh_tensor, 1),
    "a hook inside": (inner_hook, 1),
}


@pytest.mark.parametrize("merge_layers", [1, 0])
@pytest.mark.parametrize("name", CHANGES)
def test_each_call_sees_the_attributes_of_its_moment(device: torch.device, name: str, merge_layers: int) -> None:
    """Those of the capture are those of the call that came upon it, which later layers may not have."""
    touch, num_microbatches = CHANGES[name]
    build = partial(Stack, 3, Scaled)
    expected = run(built(build, device), device, touch, num_microbatches=num_microbatches)
    model = built(build, device)
    with attached(model, LAYERS, merge_layers=merge_layers) as manager:
        trace = run(model, device, touch, num_microbatches=num_microbatches)
        assert differences(expected, trace) == []
        assert num_replays(manager) > 0 or name == "a new tensor each step"
        assert reasons(manager).get(str(EagerReason.CHANGED_ATTRIBUTE), 0) > 0
