"""A verification leaves nothing behind: what is trained after it is what would have been trained without it."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from tests.verification import faulty
from tests.verification.ways import WAYS
from torch import nn

import graphstep
from graphstep.errors import CaptureError


def everything(model: nn.Module) -> dict[str, Any]:
    """State by name, with the identity and content of each gradient."""
    found: dict[str, Any] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        found[f"{name}.grad"] = parameter.grad
        found[f"{name}.values"] = None if parameter.grad is None else parameter.grad.clone()
    return found


def insist_on_the_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for name, value in before.items():
        if name.endswith(".grad"):
            assert after[name] is value, name
        elif value is None:
            assert after[name] is None, name
        else:
            assert torch.equal(after[name], value), name


@pytest.mark.parametrize(
    ("fault", "has_gradients"), [(faulty.Plain, False), (faulty.Plain, True), (faulty.WrongWeightGradient, True)]
)
@pytest.mark.parametrize("way", WAYS)
def test_all_state_is_put_back(way: str, fault: type[nn.Module], has_gradients: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    model = faulty.Model(fault()).to(device)
    with WAYS[way](model, device) as (target, batches, step):
        if has_gradients:
            for parameter in model.parameters():
                parameter.grad = torch.rand_like(parameter)
        before = everything(model)
        states = torch.get_rng_state(), random.getstate()
        cuda = torch.cuda.get_rng_state() if device.type == "cuda" else torch.empty(0)
        report = graphstep.verify(target, batches, step)
        assert report.equal is (fault is faulty.Plain)
        insist_on_the_same(before, everything(model))
        assert torch.equal(torch.get_rng_state(), states[0])
        assert random.getstate() == states[1]
        if device.type == "cuda":
            assert torch.equal(torch.cuda.get_rng_state(), cuda)
        if way != "callables":
            assert target.report().num_recordings == 0


def losses_of(model: nn.Module, step: Any, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [step(batch) for batch in batches]


@pytest.mark.parametrize("is_verified", [False, True])
def test_a_step_trains_as_if_it_had_not_been_verified(is_verified: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    models = [faulty.Model(faulty.Plain()).to(device)]
    models.append(copy.deepcopy(models[0]))
    data = faulty.batches(device, 8)
    traces = []
    for model, verifies in zip(models, (False, is_verified), strict=True):
        # Momentum: the first step is another one than those that follow.
        optimizer = torch.optim.SGD(model.parameters(), lr=2**-6, momentum=0.9, dampening=0.5, fused=True)

        def update(x: torch.Tensor, model: nn.Module = model, optimizer: torch.optim.SGD = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = graphstep.graph_step(update)
        if verifies:
            assert graphstep.verify(step, data[:3]).equal
            assert not optimizer.state
        traces.append(losses_of(model, step, data))
        assert step.report().rows[0].num_replays >= 5
        step.close()
    assert all(torch.equal(a, b) for a, b in zip(*traces, strict=True))
    states = [model.state_dict() for model in models]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_graphs_that_were_there_stay(device: torch.device) -> None:
    torch.manual_seed(0)
    model = faulty.Model(faulty.Plain()).to(device)
    with WAYS["attach"](model, device) as (manager, batches, _):
        for batch in batches:
            model(batch).square().mean().backward()
            manager.end_step()
        assert (number := manager.report().num_recordings) > 0
        before = everything(model)
        assert graphstep.verify(manager, batches).equal
        assert manager.report().num_recordings == number
        insist_on_the_same(before, everything(model))


class Fragile(faulty.Plain):
    """Reads a value back, which no graph can."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(x.detach().sum() > -1e9)


def test_a_failed_capture_leaves_nothing_behind_either(device: torch.device) -> None:
    torch.manual_seed(0)
    model = faulty.Model(Fragile()).to(device)
    before, state = everything(model), torch.get_rng_state()
    with WAYS["full_iteration"](model, device) as (target, batches, step), pytest.raises(CaptureError):
        graphstep.verify(target, batches, step)
    insist_on_the_same(before, everything(model))
    assert torch.equal(torch.get_rng_state(), state)


class Noted(faulty.Plain):
    """Keeps in plain attributes what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[int] = []
        self.last = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x.shape[0]
        self.training_steps = 1
        return super().forward(x)


def test_attributes_of_modules_are_put_back(device: torch.device) -> None:
    model = faulty.Model(Noted()).to(device)
    with WAYS["attach"](model, device) as (target, batches, step):
        graphstep.verify(target, batches, step)
        assert model.blocks[1].last == 0
        assert not hasattr(model.blocks[1], "training_steps")


class Rebinding(faulty.Model):
    """Puts another tensor in the place of a buffer, outside of what is captured."""

    def __init__(self) -> None:
        super().__init__(faulty.Plain())
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps = self.steps + 1
        return super().forward(x)


def test_buffers_are_the_same_objects(device: torch.device) -> None:
    model = Rebinding().to(device)
    steps = model.steps
    report = graphstep.verify(model, faulty.batches(device), regions={"blocks.*": "layer"})
    assert report.equal, str(report)
    assert model.steps is steps
    assert steps == 0
