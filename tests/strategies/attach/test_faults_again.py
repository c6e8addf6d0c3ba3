"""What is computed again for its backward, because it was used in part, reads what the forward has read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.strategies.attach.plain import HIDDEN, LAYERS, Stack, attached, built, inputs, num_replays, train
from torch import Tensor, nn

from graphstep.errors import LifecycleError


class Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("shift", torch.zeros(HIDDEN))
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x) + self.shift)
        return y * self.scale if self.training else y * 0.5


class Probed(Stack):
    """From some step on, the result of the first layer has a use of its own."""

    def __init__(self) -> None:
        super().__init__(2, Switched)
        self.is_probed = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](self.inp(x))
        loss: Tensor = self.out(self.layers[1](y)).square().mean()
        return loss + y.square().mean() if self.is_probed else loss


class TwoResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Switched()

    def forward(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return y, torch.tanh(y + table)


class TwoUsed(nn.Module):
    """In the first steps only the first result is used; the second reads a buffer of the model, given to the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1)
        self.layers = nn.ModuleList([TwoResults(), TwoResults()])
        self.register_buffer("table", torch.ones(HIDDEN))
        self.is_probed = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        total = x.new_zeros(())
        for layer in self.layers:
            x, other = layer(x, self.table)
            total = total + other.mean() if self.is_probed else total
        loss: Tensor = self.out(x).square().mean() + total
        return loss


Change = Callable[[Any], Any]


def layer_of(model: Any) -> Any:
    return model.layers[0].inner if isinstance(model, TwoUsed) else model.layers[0]


@torch.no_grad()
def write_buffer(model: Any) -> None:
    layer_of(model).shift.add_(1.0)


@torch.no_grad()
def write_table(model: Any) -> None:
    model.table.add_(1.0)


def set_attribute(model: Any) -> None:
    layer_of(model).scale = 3.0


def add_hook(model: Any) -> None:
    layer_of(model).linear.register_forward_hook(lambda _module, _arguments, result: result * 2)


def switch_to_evaluation(model: Any) -> None:
    model.eval()


REFUSED: dict[Change, str] = {
    write_buffer: "written between the forward and the backward",
    set_attribute: "scale was changed",
    add_hook: "hook",
}


def gradients(model: Any, device: torch.device, change: Change) -> list[Tensor]:
    model.zero_grad()
    model.is_probed = True
    loss = model(inputs(device, 9))
    change(model)
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def check(model: Any, eager: Any, device: torch.device, change: Change, text: str, where: str, **config: Any) -> None:
    """As eager execution, or refused with this text."""
    train(eager, device, 3)
    expected = gradients(eager, device, change)
    with attached(model, LAYERS, **config) as manager:
        train(model, device, 3)
        assert num_replays(manager) == 4
        if not text:
            found = gradients(model, device, change)
            assert all(map(torch.equal, expected, found))
            return
        with pytest.raises(LifecycleError, match=text) as raised:
            gradients(model, device, change)
        assert raised.value.where == where


@pytest.mark.parametrize("change", [*REFUSED, switch_to_evaluation, lambda model: None])
def test_s5_merged_layers_that_were_used_in_part(device: torch.device, change: Change) -> None:
    model, eager = built(Probed, device), built(Probed, device)
    check(model, eager, device, change, REFUSED.get(change, ""), "layers.0", merge_layers=0)


@pytest.mark.parametrize("change", [*REFUSED, write_table, switch_to_evaluation, lambda model: None])
def test_s5_a_result_that_had_no_gradient_before(device: torch.device, change: Change) -> None:
    model, eager = built(TwoUsed, device), built(TwoUsed, device)
    text = {**REFUSED, write_table: "argument was written"}.get(change, "")
    check(model, eager, device, change, text, "layers.1" if change is write_table else "layers.0")
