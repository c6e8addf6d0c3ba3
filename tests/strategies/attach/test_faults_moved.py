"""Weights and buffers that get other memory between two layers of a step: noticed at the call that would read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.plain import HIDDEN, LAYERS, Stack, attached, built, inputs, num_replays, reasons, train
from tests.strategies.runs import differences
from torch import Tensor, nn

from graphstep.errors import StaleAddressError


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("shift", torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) + self.shift


@contextmanager
def other_data(layer: Any) -> Iterator[None]:
    weight = layer.linear.weight
    kept, weight.data = weight.data, weight.data * 2
    yield
    weight.data = kept


@contextmanager
def other_parameter(layer: Any) -> Iterator[None]:
    kept = layer.linear.weight
    layer.linear.weight = nn.Parameter(kept.detach() * 2)
    yield
    layer.linear.weight = kept


@contextmanager
def other_buffer(layer: Any) -> Iterator[None]:
    kept, layer.shift = layer.shift, layer.shift + 1
    yield
    layer.shift = kept


@contextmanager
def other_module(layer: Any) -> Iterator[None]:
    kept, layer.linear = layer.linear, nn.Linear(HIDDEN, HIDDEN, device=layer.shift.device)
    yield
    layer.linear = kept


Moves = Callable[[Any], AbstractContextManager[None]]
MOVES: tuple[Moves, ...] = (other_data, other_parameter, other_buffer, other_module)


@pytest.mark.parametrize("move", MOVES)
def test_s6_what_moves_between_two_layers_is_named_in_that_step(device: torch.device, move: Moves) -> None:
    moved: list[int] = []

    def call(layer: nn.Module, x: Tensor, index: int) -> Tensor:
        if index in moved:
            with move(layer):
                return layer(x)  # type: ignore[no-any-return]
        return layer(x)  # type: ignore[no-any-return]

    model = built(partial(Stack, 3, Shifted, call), device)
    with attached(model, LAYERS) as manager:
        train(model, device, 3)
        moved[:] = [2]
        with pytest.raises(StaleAddressError, match=r"layers\.2\.") as raised:
            model(inputs(device, 5))
        assert "layers.1" not in raised.value.what
        assert num_replays(manager) == 3 * 2 + 2


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("move", MOVES)
def test_s6_what_moves_between_two_steps_is_named_in_the_next(device: torch.device, move: Moves, index: int) -> None:
    model = built(partial(Stack, 3, Shifted), device)
    with attached(model, LAYERS) as manager:
        train(model, device, 3)
        with move(model.layers[index]), pytest.raises(StaleAddressError, match=rf"layers\.{index}\."):
            model(inputs(device, 5))
        manager.close()


@pytest.mark.parametrize("move", [other_data, other_buffer])
def test_s6_what_moves_between_two_layers_of_a_graph(device: torch.device, move: Moves) -> None:
    """That layer has run ahead with the old one: it runs eagerly with what is there now."""
    steps = {"now": 0}

    def call(layer: nn.Module, x: Tensor, index: int) -> Tensor:
        if index == 2 and steps["now"] >= 3:
            with move(layer):
                return layer(x)  # type: ignore[no-any-return]
        return layer(x)  # type: ignore[no-any-return]

    def before(step: int) -> None:
        steps["now"] = step

    build = partial(Stack, 3, Shifted, call)
    expected = train(built(build, device), device, 6, before=before)
    model = built(build, device)
    with attached(model, LAYERS, merge_layers=0, on_mismatch="eager") as manager:
        assert differences(expected, train(model, device, 6, before=before)) == []
        assert manager.report().rows[0].num_replays == 5
        assert reasons(manager)["written between merged layers"] == 3


def test_s6_what_moves_between_forward_and_backward_is_named_at_the_next_call(device: torch.device) -> None:
    """The backward is that of the forward, as in eager execution, as long as somebody keeps the old memory."""
    found = []
    for is_attached in (False, True):
        model = built(partial(Stack, 2, Shifted), device)
        with attached(model, LAYERS, policy="required" if is_attached else "off") as manager:
            train(model, device, 3)
            model.zero_grad()
            loss = model(inputs(device, 5))
            weight = model.layers[1].linear.weight
            kept, weight.data = weight.data, weight.data * 2
            loss.backward()
            found.append([parameter.grad for parameter in model.parameters()])
            assert num_replays(manager) == (2 * 3 if is_attached else 0)
            if is_attached:
                with pytest.raises(StaleAddressError, match=r"weight layers\.1\.linear\.weight moved"):
                    model(inputs(device, 6))
            del kept
    assert all(map(torch.equal, *found))
