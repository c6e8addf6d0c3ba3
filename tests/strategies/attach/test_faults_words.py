"""What errors and reports say: the cause, the place once, and advice that can be followed."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.plain import HIDDEN, LAYERS, Stack, attached, built, inputs, num_replays, train
from torch import Tensor, nn

from graphstep.capture.reasons import EagerReason
from graphstep.errors import CaptureError, StaleAddressError


class IntoDict(nn.Module):
    """Returns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, state: dict[str, Tensor]) -> None:
        state["hidden"] = torch.tanh(self.linear(state["hidden"]))


def through_dict(layer: nn.Module, x: Tensor, index: int) -> Tensor:
    state = {"hidden": x}
    layer(state)
    return state["hidden"]


def test_e7_a_region_that_returns_nothing(device: torch.device) -> None:
    """Has no gradient to be captured for, and that is what is counted."""
    model = built(partial(Stack, 2, IntoDict, through_dict), device)
    with attached(model, LAYERS) as manager:
        train(model, device, 5)
        for row in manager.report().rows:
            assert row.eager_calls == {EagerReason.OBSERVED: 1, EagerReason.NO_GRADIENT: 4}
    assert "return" in EagerReason.NO_GRADIENT.advice


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x.add_(1.0) * self.linear(x)
        return result


def test_e7_an_argument_with_a_gradient_is_changed_in_place(device: torch.device) -> None:
    model = built(partial(Stack, 2, InPlace), device)
    with attached(model, LAYERS), pytest.raises(CaptureError, match="writes into its arguments") as raised:
        train(model, device, 3)
    assert raised.value.where.count("layers.0") == 1
    assert "x.add_(1.0)" in raised.value.where
    assert "makes a new tensor" in raised.value.fix


def test_e7_everything_has_moved(device: torch.device) -> None:
    """The first ones are named, and attached users are told what they can do."""
    model = built(partial(Stack, 3), device)

    def move(step: int) -> None:
        for parameter in model.layers.parameters() if step == 3 else ():
            parameter.data = parameter.data.clone()

    with attached(model, LAYERS), pytest.raises(StaleAddressError) as raised:
        train(model, device, 4, before=move)
    assert raised.value.what.count(" moved") == 12
    assert raised.value.what.endswith(f"and {len(list(model.layers.parameters())) - 12} more")
    assert "attach again" in raised.value.fix
    assert "reset_cuda_graph" not in raised.value.fix


def test_e7_a_compiled_layer_beside_its_graphs(device: torch.device) -> None:
    """The report says why nothing is counted for it."""
    # What other tests have compiled counts: past a number of versions torch compiles no more, and the graphs are used.
    torch.compiler.reset()
    model = built(Stack, device)
    with warnings.catch_warnings(), attached(model, LAYERS) as manager:
        warnings.simplefilter("ignore")
        compiled: Any = torch.compile(model.layers[0], backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            model.layers[1](compiled(model.inp(inputs(device, step)))).sum().backward()
            optimizer.step()
        first, second = manager.report().rows
        assert num_replays(manager) == second.num_replays == 3
        assert "torch.compile" in first.why_not_captured
        assert second.why_not_captured == ""
