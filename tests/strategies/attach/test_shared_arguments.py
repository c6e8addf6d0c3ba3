"""An argument that all layers take: its one copy is not overwritten while a backward still needs it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphstep
from graphstep.config import CudaGraphConfig
from graphstep.native.build import VARIABLE


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x) * mask)


class Model(nn.Module):
    """May change what its second layer is given: the tensor, or the mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.change = ""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.layers[0](x, mask)
        x = self.layers[1](x * 1.1 if self.change == "tensor" else x, 1 - mask if self.change == "mask" else mask)
        result: Tensor = self.layers[2](x, mask)
        return result


def gradients(change: str, is_graphed: bool) -> list[Tensor]:
    """Of steps with two microbatches in flight. In the first one their losses are added: no layers are chained."""
    model = Model()
    config = CudaGraphConfig(impl="local", merge_layers=1, on_mismatch="eager")
    graphs: Any = graphstep.attach(model, config, regions={"layers.*": "layer"}) if is_graphed else None

    def loss(number: int) -> Tensor:
        torch.manual_seed(number)
        return model(torch.randn(2, 8, requires_grad=True), torch.rand(2, 8).round()).square().sum()

    (loss(0) + loss(1)).backward()
    model.zero_grad()
    if is_graphed:
        graphs.end_step()
    model.change = change
    found: list[Tensor] = []
    for number in range(4, 8):
        first, second = loss(number), loss(number + 10)
        for each in (second, first):
            each.backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
    if is_graphed:
        assert any(row.num_replays for row in graphs.report().rows)
        graphs.close()
    return found


@pytest.mark.parametrize("choice", ["auto", "off"])
@pytest.mark.parametrize("change", ["", "tensor", "mask"])
def test_a_shared_mask_stays_as_long_as_it_is_needed(monkeypatch: pytest.MonkeyPatch, change: str, choice: str) -> None:
    monkeypatch.setenv(VARIABLE, choice)
    mine, theirs = gradients(change, True), gradients(change, False)
    assert all(torch.equal(one, other) for one, other in zip(mine, theirs, strict=True))
