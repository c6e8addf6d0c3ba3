"""Optimizers of the user's own in a captured step: what they keep is watched, and refused where a replay loses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.strategies.step_jobs import Job, compared, plain_step, replays
from torch import Tensor
from torch.optim import Optimizer

import graphstep
from graphstep.errors import CaptureError

FACTOR = 1.0


class Own(Optimizer):
    """Its subclasses say by what a gradient is scaled."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.factor = 1.0
        self.count = 0
        self.calls: list[int] = []

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        self.begin()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(self.scaled(parameter, parameter.grad, group) * group["lr"])

    def begin(self) -> None:
        """Before the first parameter."""

    def scaled(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient * self.factor * FACTOR


class CountsInAttribute(Own):
    def begin(self) -> None:
        self.count += 1
        self.factor = 1.0 / self.count


class CountsInList(Own):
    def begin(self) -> None:
        self.calls.append(0)
        self.factor = 1.0 / len(self.calls)


class CountsInGroup(Own):
    def scaled(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        group["count"] = group.get("count", 0) + 1
        return gradient / group["count"]


class ReplacesState(Own):
    def scaled(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        momentum: Tensor = self.state[parameter].get("momentum", torch.zeros_like(parameter)) * 0.9 + gradient
        self.state[parameter]["momentum"] = momentum
        return momentum


class ReplacesAttribute(Own):
    def begin(self) -> None:
        device = self.param_groups[0]["params"][0].device
        self.total = getattr(self, "total", torch.zeros((), device=device)) + 1

    def scaled(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        return gradient / self.total


class WritesState(Own):
    def scaled(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(parameter)
        momentum: Tensor = state["momentum"]
        return momentum.mul_(0.9).add_(gradient).clone()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (CountsInAttribute, "CountsInAttribute.count"),
        (CountsInList, "CountsInList.calls"),
        (CountsInGroup, "param_groups[0]['count']"),
        (ReplacesState, "state[0]['momentum']"),
        (ReplacesAttribute, "ReplacesAttribute.total"),
    ],
)
def test_what_a_replay_would_lose_is_refused(device: torch.device, kind: type[Own], text: str) -> None:
    def script(job: Job) -> None:
        job.optimizer = kind(job.model.parameters(), lr=2.0**-6)
        for _ in range(8):
            job.run()

    with pytest.warns(UserWarning, match="each (run|step)"):
        job = compared(device, plain_step, script, policy="auto")
    assert replays(job) == 0
    assert any(text in reason for reason in job.step.report().rows[0].eager_calls)
    job.close()


def test_a_refusal_leaves_the_optimizer_as_it_was() -> None:
    job = Job(torch.device("cpu"), True, plain_step)
    job.optimizer = CountsInGroup(job.model.parameters(), lr=2.0**-6)
    for _ in range(3):
        job.run()
    before = job.optimizer.param_groups[0]["count"]
    with pytest.raises(CaptureError, match="replaces CountsInGroup"):
        job.run()
    assert job.optimizer.param_groups[0]["count"] == before
    job.close()


def test_state_that_is_written_in_place_is_captured(device: torch.device) -> None:
    def script(job: Job) -> None:
        job.optimizer = WritesState(job.model.parameters(), lr=2.0**-6)
        for index in range(9):
            job.optimizer.param_groups[0]["lr"] = 2.0 ** -(6 + index % 3)
            job.run()

    job = compared(device, plain_step, script)
    assert replays(job) == 6
    job.close()


def test_attributes_and_variables_that_change_are_followed(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(job: Job) -> None:
        job.optimizer = optimizer = Own(job.model.parameters(), lr=2.0**-6)
        for index in range(16):
            optimizer.factor = 0.5 if index >= 6 else 1.0
            monkeypatch.setitem(globals(), "FACTOR", 2.0 if index >= 11 else 1.0)
            job.run()

    job = compared(device, plain_step, script)
    assert replays(job) == 16 - 3 - 2 - 2
    job.close()


def test_an_optimizer_graph_follows_attributes() -> None:
    weights = []
    for is_graphed in (False, True):
        weight = torch.ones(4, requires_grad=True)
        optimizer = Own([weight], lr=2.0**-4)
        graphed = graphstep.OptimizerGraph(optimizer) if is_graphed else None
        for index in range(12):
            weight.grad = torch.full((4,), 1.0 + index)
            optimizer.factor = 0.5 if index >= 6 else 1.0
            (graphed or optimizer).step()
        weights.append(weight.detach().clone())
        if graphed is not None:
            assert graphed.report().rows[0].num_replays == 6
            graphed.close()
    assert torch.equal(*weights)
