"""Parameters that are frozen in a part of each step, or from some step on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.plain import LAYERS, Stack, attached, built, inputs, num_replays, reasons, train
from tests.strategies.runs import differences
from torch import Tensor, nn

from graphstep.errors import InputMismatchError, LifecycleError


class Adversaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = Stack(1), Stack(2)


def play(model: Any, device: torch.device, num_steps: int, *, is_detached: bool) -> list[Tensor]:
    """Train the judge on what the maker makes, then the maker against a frozen judge."""
    maker, judge = model.maker.layers[0], model.judge
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (model.maker, judge)]
    trace: list[Tensor] = []
    for step in range(num_steps):
        optimizers[1].zero_grad()
        made = maker(inputs(device, step))
        given = made.detach() if is_detached else maker(inputs(device, 50 + step))
        (judge(inputs(device, 100 + step)) - judge(given)).backward()
        optimizers[1].step()
        trace += [parameter.grad.clone() for parameter in judge.parameters()]
        judge.requires_grad_(False)
        optimizers[0].zero_grad()
        judge(made).backward()
        optimizers[0].step()
        judge.requires_grad_(True)
        trace += [p.grad.clone() for p in model.maker.layers.parameters()]
        trace += [p.detach().clone() for p in model.parameters()]
    return trace


@pytest.mark.parametrize("merge_layers", [1, 0])
@pytest.mark.parametrize("policy", ["required", "auto"])
@pytest.mark.parametrize("is_detached", [True, False])
def test_e3_a_judge_that_is_frozen_while_the_maker_trains(
    device: torch.device, policy: str, merge_layers: int, is_detached: bool
) -> None:
    expected = play(built(Adversaries, device), device, 8, is_detached=is_detached)
    model = built(Adversaries, device)
    regions = {"maker.layers.*": "layer", "judge.layers.*": "layer"}
    with attached(model, regions, policy=policy, merge_layers=merge_layers) as manager:
        found = play(model, device, 8, is_detached=is_detached)
        assert all(map(torch.isfinite, (tensor.sum() for tensor in expected)))
        assert all(map(torch.equal, expected, found))
        # Both ways of calling the judge have graphs in the end.
        assert all(
            row.num_replays >= 3 * 3 and row.num_signatures >= 2
            for row in manager.report().rows
            if row.name.startswith("judge")
        )
    assert all(parameter.requires_grad for parameter in model.parameters())


def freezing(model: nn.Module, is_frozen_in: Callable[[int], bool]) -> Callable[[int], None]:
    def change(step: int) -> None:
        model.layers[1].attn.requires_grad_(not is_frozen_in(step))

    return change


@pytest.mark.parametrize("merge_layers", [1, 0])
@pytest.mark.parametrize("name", ["from a step on", "in every other step", "until a step"])
def test_e3_a_part_of_a_layer_is_frozen(device: torch.device, name: str, merge_layers: int) -> None:
    """Runs eagerly at first, and has graphs for both soon after."""
    is_frozen_in = {
        "from a step on": lambda step: step >= 3,
        "in every other step": lambda step: step % 2 == 1,
        "until a step": lambda step: step < 3,
    }[name]
    model = built(Stack, device)
    optimized = {"num_steps": 10}
    expected = train(model, device, before=freezing(model, is_frozen_in), **optimized)
    model = built(Stack, device)
    with attached(model, LAYERS, merge_layers=merge_layers) as manager:
        assert differences(expected, train(model, device, before=freezing(model, is_frozen_in), **optimized)) == []
        assert manager.report().rows[1].num_signatures == 2
        assert num_replays(manager) >= 12
        assert set(reasons(manager)) <= {"observed", "another signature", "out of the order of the first step"}
        assert any("frozen or thawed" in text for text in manager.report().rows[1].last_mismatch)


def test_e3_frozen_where_that_is_an_error(device: torch.device) -> None:
    model = built(Stack, device)
    change = freezing(model, lambda step: step == 3)
    with attached(model, LAYERS, on_mismatch="error"), pytest.raises(InputMismatchError, match="frozen") as raised:
        train(model, device, 4, before=change)
    assert raised.value.where == "layers.1"


def test_e3_frozen_between_forward_and_backward(device: torch.device) -> None:
    """Eager execution gives it no gradient; the captured backward would."""
    model = built(Stack, device)
    with attached(model, LAYERS) as manager:
        train(model, device, 3)
        assert num_replays(manager) == 4
        loss = model(inputs(device, 7))
        model.layers[0].norm.requires_grad_(False)
        with pytest.raises(LifecycleError, match="between the forward and the backward") as raised:
            loss.backward()
    assert raised.value.where == "layers.0"


def test_e3_a_layer_without_gradients_in_the_first_step(device: torch.device) -> None:
    """Frozen with all that comes before it, thawed later: it has graphs of its own then."""

    def change(model: nn.Module, step: int) -> None:
        for part in (model.inp, model.layers[0]):
            part.requires_grad_(step >= 3)

    model = built(Stack, device)
    expected = full_train(model, device, partial(change, model))
    model = built(Stack, device)
    with attached(model, LAYERS) as manager:
        assert differences(expected, full_train(model, device, partial(change, model))) == []
        assert manager.report().rows[0].num_replays > 0


def full_train(model: nn.Module, device: torch.device, before: Callable[[int], None]) -> Any:
    """As ``train`` does, with all parameters in the optimizer, frozen ones as well."""
    return train(model, device, 9, before=before)
