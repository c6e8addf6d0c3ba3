"""What is done between the forward and the backward of a replay: results changed in place, graphs closed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from tests.strategies.attach.plain import HIDDEN, LAYERS, Stack, attached, built, inputs, num_replays, reasons, same
from torch import Tensor, nn

from graphstep.errors import LifecycleError


class WithHead(nn.Module):
    """Returns a result and a view of it, with or without its gradient."""

    def __init__(self, is_detached: bool = False) -> None:
        super().__init__()
        self.linear, self.is_detached = nn.Linear(HIDDEN, HIDDEN), is_detached

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(self.linear(x)) * 2
        return y, (y.detach() if self.is_detached else y)[:1]


def first_of(layer: nn.Module, x: Tensor, index: int, change: Callable[[Tensor, Tensor], object]) -> Tensor:
    y, head = layer(x)
    change(y, head)
    result: Tensor = y + head.sum()
    return result


CHANGES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "the view": lambda y, head: head.mul_(3.0),
    "the whole": lambda y, head: y.mul_(3.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_s4_a_result_that_shares_memory_with_another_one_is_changed(device: torch.device, name: str) -> None:
    """Eager autograd knows the gradient of both; a replay does not, and says so."""
    turn = {"step": 0}

    def change(y: Tensor, head: Tensor) -> None:
        if turn["step"] == 3:
            CHANGES[name](y, head)

    model = built(partial(Stack, 2, WithHead, partial(first_of, change=change)), device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, LAYERS) as manager:
        for step in range(3):
            model(inputs(device, step)).backward()
            optimizer.step()
        assert num_replays(manager) == 4
        turn["step"] = 3
        loss = model(inputs(device, 3))
        with pytest.raises(LifecycleError, match="shares memory with another result") as raised:
            loss.backward()
    assert raised.value.where.startswith("layers.")
    assert "clone" in raised.value.fix


def test_s4_a_detached_view_may_be_changed(device: torch.device) -> None:
    """Its result is not needed for the backward, and autograd sees nothing in eager execution either."""
    build = partial(Stack, 2, partial(WithHead, True), partial(first_of, change=lambda y, head: head.mul_(1.5)))
    assert same(device, build, num_microbatches=1, replays=2 * 4) == {"observed": 2}


def test_s4_results_that_share_memory_and_are_kept(device: torch.device) -> None:
    """Nobody gets copies that share nothing: what is changed through one is seen through the other."""
    found = []
    for is_graphed in (False, True):
        model = built(partial(Stack, 1, WithHead), device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        values: list[Tensor] = []
        with attached(model, LAYERS, policy="required" if is_graphed else "off", capture_after=1) as manager:
            kept: list[Tensor] = []
            for step in range(8):
                optimizer.zero_grad()
                y, head = model.layers[0](inputs(device, step))
                (y.sum() + head.sum()).backward()
                optimizer.step()
                with torch.no_grad():
                    head.detach().mul_(3.0)
                kept.append(y.detach())
                values.append(y.detach().clone())
            assert all(map(torch.equal, kept, values))
            if is_graphed:
                assert num_replays(manager) > 0
                assert reasons(manager)["an earlier result is still held"] > 0
        found.append(torch.stack(values))
    assert torch.equal(*found)


def test_e5_the_graphs_are_closed_before_the_backward(device: torch.device) -> None:
    """The error names the call; the next step runs eagerly."""
    model = built(Stack, device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, LAYERS) as manager:
        for step in range(3):
            optimizer.zero_grad()
            model(inputs(device, step)).backward()
            optimizer.step()
        assert num_replays(manager) > 0
        loss = model(inputs(device, 3))
    with pytest.raises(LifecycleError, match="closed between the forward and the backward") as raised:
        loss.backward()
    assert "layers.1" in raised.value.where
    assert "close()" in raised.value.fix
    optimizer.zero_grad()
    model(inputs(device, 3)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
