"""Optimizers in a captured step: others are refused, rates are on the device, what a graph has fixed is watched."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from graphstep.errors import CaptureError
from graphstep.strategies.optimizers_inside import OptimizersInside, others_refused

CPU = torch.device("cpu")


def optimizer(lr: float | Tensor = 0.1, kind: Any = torch.optim.SGD, **options: Any) -> torch.optim.Optimizer:
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.ones(2)
    made: torch.optim.Optimizer = kind([weight], lr=lr, **options)
    return made


def test_a_rate_of_the_host_is_refused() -> None:
    with others_refused((), "here"), pytest.raises(CaptureError, match="learning rate"):
        optimizer().step()
    optimizer().step()


def test_a_rate_on_the_device_is_not() -> None:
    with others_refused((), "here"):
        optimizer(torch.tensor(0.1)).step()


def test_a_known_one_is_not() -> None:
    known = optimizer()
    with others_refused([id(known)], "here"):
        known.step()


def test_other_threads_step_meanwhile() -> None:
    failures: list[BaseException] = []

    def step() -> None:
        try:
            optimizer().step()
        except CaptureError as error:
            failures.append(error)

    with others_refused((), "here"):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    assert failures == []


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (torch.optim.AdamW, {}, "AdamW reads its learning rate"),
        (torch.optim.SGD, {}, "SGD reads its learning rate"),
        (torch.optim.Adam, {"foreach": True}, "Adam reads its learning rate"),
        (torch.optim.AdamW, {"fused": True}, None),
        (torch.optim.AdamW, {"capturable": True}, None),
        (torch.optim.SGD, {"fused": True, "momentum": 0.9}, None),
    ],
)
def test_which_can_be_captured(kind: Any, options: dict[str, Any], text: str | None) -> None:
    inside = OptimizersInside([optimizer(kind=kind, **options)], CPU)
    if text is None:
        inside.require_capturable("the step")
        return
    with pytest.raises(CaptureError, match=text) as caught:
        inside.require_capturable("the step")
    assert "fused=True" in caught.value.fix


def test_all_problems_at_once() -> None:
    hooked = optimizer(kind=torch.optim.AdamW)
    hooked.register_step_pre_hook(lambda *_: None)
    inside = OptimizersInside([hooked, optimizer()], CPU)
    with pytest.raises(CaptureError) as caught:
        inside.require_capturable("the step")
    assert "1 hooks" in caught.value.what
    assert "AdamW reads" in caught.value.what
    assert "SGD reads" in caught.value.what


def test_rates_are_tensors_inside_and_the_users_numbers_outside() -> None:
    fused = optimizer(0.25, torch.optim.AdamW, fused=True)
    inside = OptimizersInside([fused], CPU).noted()
    with inside.on_device():
        rate = fused.param_groups[0]["lr"]
        assert isinstance(rate, Tensor)
        assert rate.item() == 0.25
    assert fused.param_groups[0]["lr"] == 0.25
    assert type(fused.param_groups[0]["lr"]) is float
    fused.param_groups[0]["lr"] = 0.5
    assert inside.refresh() == []
    assert rate.item() == 0.5


@pytest.mark.parametrize("in_place", [True, False])
def test_a_rate_that_is_set_inside_stays_and_is_refused_at_the_capture(in_place: bool) -> None:
    fused = optimizer(0.25, torch.optim.AdamW, fused=True)
    inside = OptimizersInside([fused], CPU)
    with inside.on_device():
        if in_place:
            fused.param_groups[0]["lr"].fill_(0.5)
        else:
            fused.param_groups[0]["lr"] = 0.5
    assert fused.param_groups[0]["lr"] == 0.5
    with pytest.raises(CaptureError, match="learning rate") as caught:
        inside.require_capturable("the step")
    assert "scheduler.step()" in caught.value.fix


def test_other_numbers_are_named() -> None:
    fused = optimizer(0.25, torch.optim.AdamW, fused=True)
    inside = OptimizersInside([fused], CPU).noted()
    assert inside.refresh() == []
    fused.param_groups[0]["weight_decay"] = 0.3
    fused.param_groups[0]["betas"] = (0.8, 0.9)
    assert inside.refresh() == ["betas", "weight_decay"]


def test_state_and_parameters_are_watched() -> None:
    fused = optimizer(0.25, torch.optim.AdamW, fused=True)
    fused.step()
    inside = OptimizersInside([fused], CPU).noted()
    assert inside.moved() == []
    fused.load_state_dict(fused.state_dict())
    assert inside.moved()
    inside = inside.noted()
    fused.add_param_group({"params": [torch.ones(1, requires_grad=True)]})
    assert inside.moved() == ["the parameters of an optimizer"]


def test_hooks_and_frozen_parameters_are_watched() -> None:
    fused = optimizer(0.25, torch.optim.AdamW, fused=True)
    inside = OptimizersInside([fused], CPU).noted()
    handle = fused.register_step_post_hook(lambda *_: None)
    assert inside.moved() == ["hooks, step or frozen parameters of an optimizer"]
    handle.remove()
    assert inside.moved() == []
    fused.param_groups[0]["params"][0].requires_grad_(False)
    assert inside.moved() == ["hooks, step or frozen parameters of an optimizer"]
