"""Callables among the arguments that collect what a region computes, and weights that several calls share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.strategies.attach.plain import HIDDEN, LAYERS, Stack, attached, built, inputs, num_replays, reasons
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from graphstep.errors import CaptureError


class Reporting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, report: Callable[[Tensor], Any]) -> Tensor:
        y = torch.tanh(self.linear(x))
        report(y.square().mean())
        return y


class Collector:
    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def add(self, value: Tensor) -> None:
        self.found.append(value)


class Counting(Collector):
    """Callable itself."""

    def __call__(self, value: Tensor) -> None:
        self.add(value)


def closure(found: list[Tensor]) -> Callable[[Tensor], None]:
    def add(value: Tensor) -> None:
        found.append(value)

    return add


def method(found: list[Tensor]) -> Any:
    made = Collector()
    made.found = found
    return made.add


def called(found: list[Tensor]) -> Any:
    made = Counting()
    made.found = found
    return made


def by_partial(found: list[Tensor]) -> Any:
    return partial(lambda value, into: into.append(value), into=found)


COLLECTORS: dict[str, Callable[[list[Tensor]], Any]] = {
    "append": lambda found: found.append,
    "closure": closure,
    "method": method,
    "object": called,
    "partial": by_partial,
}


def trained(model: Any, device: torch.device, name: str, num_steps: int = 4) -> list[Tensor]:
    """Losses that are collected count: two each step."""
    collected: list[Tensor] = []
    report = COLLECTORS[name](collected)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = []
    for step in range(num_steps):
        optimizer.zero_grad()
        collected.clear()
        x = inputs(device, step)
        for layer in model.layers:
            x = layer(x, report)
        assert len(collected) == 2
        (x.mean() + torch.stack(collected).sum()).backward()
        optimizer.step()
        trace += [parameter.detach().clone() for parameter in model.layers.parameters()]
    return trace


@pytest.mark.parametrize("name", COLLECTORS)
def test_e6_a_callable_argument_that_collects(device: torch.device, name: str) -> None:
    """Refused by name, or eager; nothing of warmup and capture is left in the list."""
    build = partial(Stack, 2, Reporting)
    expected = trained(built(build, device), device, name)
    model = built(build, device)
    with attached(model, LAYERS, policy="auto") as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert all(map(torch.equal, expected, trained(model, device, name)))
        assert num_replays(manager) == 0
        assert all("callable" in row.why_not_captured for row in manager.report().rows)
    model = built(build, device)
    with (
        attached(model, LAYERS),
        pytest.raises(CaptureError, match="what a callable among its arguments holds") as raised,
    ):
        trained(model, device, name)
    assert raised.value.where.startswith("layers.0")


def test_e6_a_callable_argument_that_only_computes(device: torch.device) -> None:
    """Whatever it holds."""
    config, seen = SimpleNamespace(scale=2.0), [torch.ones(3)]

    def scale(value: Tensor) -> Tensor:
        return value * config.scale * len(seen)

    model = built(partial(Stack, 2, Reporting, lambda layer, x, index: layer(x, scale)), device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, LAYERS) as manager:
        for step in range(4):
            optimizer.zero_grad()
            model(inputs(device, step)).backward()
            optimizer.step()
        assert num_replays(manager) == 2 * 3


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class HalfNormed(Stack):
    """One layer has parametrized weights, the other one has not."""

    def __init__(self) -> None:
        super().__init__(2)
        self.layers[1] = Normed()


def cached_from(model: nn.Module, device: torch.device, first: int) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace = []
    for step in range(5):
        optimizer.zero_grad()
        if step >= first:
            with parametrize.cached():
                loss = model(inputs(device, step)) + model(inputs(device, 20 + step))
        else:
            loss = model(inputs(device, step)) + model(inputs(device, 20 + step))
        loss.backward()
        optimizer.step()
        trace += [parameter.detach().clone() for parameter in model.parameters()]
    return trace


@pytest.mark.parametrize("first", [0, 1, 3])
def test_e2_cached_weights(device: torch.device, first: int) -> None:
    """Eager with that reason where the policy allows it, also if a capture begins within; else an error."""
    expected = cached_from(built(HalfNormed, device), device, first)
    model = built(HalfNormed, device)
    with attached(model, LAYERS, policy="auto") as manager, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = cached_from(model, device, first)
        assert all(map(torch.equal, expected, found))
        assert manager.report().rows[0].num_replays == 2 * 4
        assert reasons(manager)["parametrized weights are cached"] == 2 * (5 - first)
    model = built(HalfNormed, device)
    with attached(model, LAYERS), pytest.raises(CaptureError, match=r"parametrize\.cached") as raised:
        cached_from(model, device, first)
    assert raised.value.where == "layers.1"
