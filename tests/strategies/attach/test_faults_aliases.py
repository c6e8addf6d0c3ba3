"""Results that share memory, or are one and the same tensor."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tests.strategies.attach.plain import HIDDEN, LAYERS, Stack, attached, built, num_replays, train
from tests.strategies.runs import differences
from torch import Tensor, nn

from graphstep.capture.results import ResultForm, share_memory


class Heads(nn.Module):
    """Returns its result, and a part of the same memory or the same tensor once more."""

    def __init__(self, second: str) -> None:
        super().__init__()
        self.linear, self.second = nn.Linear(HIDDEN, HIDDEN), second

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x) * 1.5  # No view of something: hooks on those are lost with a change in place.
        return y, y[:1] if self.second == "view" else y


def twice(layer: nn.Module, x: Tensor, _index: int) -> Tensor:
    first, second = layer(x)
    result: Tensor = torch.cat([first, second * 2])
    return result


def in_place(layer: nn.Module, x: Tensor, _index: int) -> Tensor:
    first, second = layer(x)
    second.mul_(3.0)
    result: Tensor = first
    return result


@pytest.mark.parametrize("second", ["view", "same"])
def test_s4_results_that_share_memory_are_replayed(device: torch.device, second: str) -> None:
    build = partial(Stack, 2, partial(Heads, second), twice)
    expected = train(built(build, device), device)
    model = built(build, device)
    with attached(model, LAYERS) as manager:
        assert differences(expected, train(model, device)) == []
        assert num_replays(manager) == 2 * 4


def test_s4_one_tensor_returned_twice_is_one_tensor(device: torch.device) -> None:
    """So that a change in place, and a look at who is who, are as in eager execution."""
    seen: list[bool] = []

    def call(layer: nn.Module, x: Tensor, index: int) -> Tensor:
        first, second = layer(x)
        seen.append(first is second)
        return in_place(lambda _: (first, second), x, index)  # type: ignore[arg-type]

    build = partial(Stack, 2, partial(Heads, "same"), call)
    expected = train(built(build, device), device)
    model = built(build, device)
    with attached(model, LAYERS) as manager:
        assert differences(expected, train(model, device)) == []
        assert num_replays(manager) == 2 * 4
    assert all(seen)


def test_s4_forms_and_shared_storages() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    a, b = ResultForm({"x": x, "y": [y, x]}).of([y, x, torch.ones(3)]).values()
    assert a is y
    assert b[0] is x
    assert b[1] is y
    x.requires_grad_()
    z = x * 2
    assert share_memory([z, y, z]) == set()
    assert share_memory([z, y, z[:1]]) == {0, 2}
