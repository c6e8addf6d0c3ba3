"""What ``graph_step`` refuses, because a replay would not do it."""

from __future__ import annotations

import enum
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.strategies.step_jobs import (
    Job,
    Loop,
    compared,
    plain_step,
    replays,
)
from torch import Tensor, nn

import graphstep
from graphstep.errors import CaptureError, ConfigError


def test_an_optimizer_that_reads_is_refused(device: torch.device) -> None:
    job = Job(device, True, plain_step)
    job.optimizer = torch.optim.AdamW(job.model.parameters(), lr=1e-3)
    for _ in range(3):
        job.run()
    with pytest.raises(CaptureError, match="AdamW reads") as caught:
        job.run()
    assert "fused=True" in caught.value.fix
    job.close()


def test_with_auto_it_goes_on_eagerly(device: torch.device) -> None:
    def script(job: Job) -> None:
        job.optimizer = torch.optim.AdamW(job.model.parameters(), lr=1e-3)
        for _ in range(7):
            job.run()

    with pytest.warns(UserWarning, match="AdamW reads"):
        job = compared(device, plain_step, script, policy="auto")
    assert replays(job) == 0
    assert any("AdamW reads" in reason for reason in job.step.report().rows[0].eager_calls)
    job.close()


def test_a_scheduler_inside_is_refused(device: torch.device) -> None:
    def make(job: Job) -> Loop:
        step = plain_step(job)
        schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, step_size=1, gamma=0.5)

        def both(batch: tuple[Tensor, Tensor]) -> Any:
            result = step(batch)
            schedule.step()
            return result

        return both

    job = Job(device, True, make)
    for _ in range(3):
        job.run()
    assert job.optimizer.param_groups[0]["lr"] == 2.0**-10, "what runs eagerly is scheduled"
    with pytest.raises(CaptureError, match="learning rate") as caught:
        job.run()
    assert "scheduler.step()" in caught.value.fix
    job.close()


def test_a_value_that_is_returned_and_changes_is_refused(device: torch.device) -> None:
    def make(job: Job) -> Loop:
        step = plain_step(job)

        def counted(batch: tuple[Tensor, Tensor]) -> Any:
            return step(batch), time.perf_counter()

        return counted

    job = Job(device, True, make)
    for _ in range(3):
        job.step(job.batch())
    with pytest.raises(CaptureError, match="something else in the capture"):
        job.step(job.batch())
    job.close()


def test_bad_options() -> None:
    with pytest.raises(ConfigError) as caught:
        graphstep.graph_step(lambda: None, cuda_graph_warmup_steps=1, max_graphs=0)
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError, match="policy"):
        graphstep.graph_step(lambda: None, policy="sometimes")


def test_accumulating_and_then_dropping_is_refused(device: torch.device) -> None:
    """What was there before counts: a graph would begin with nothing."""

    def make(job: Job) -> Loop:
        def step(batch: tuple[Tensor, Tensor], is_last: bool) -> None:
            nn.functional.mse_loss(job.model(batch[0]), batch[1]).backward()
            if is_last:
                job.optimizer.step()
                job.optimizer.zero_grad()

        return step

    job = Job(device, True, make)

    def run() -> None:
        for index in range(12):
            job.step(job.batch(), index % 2 == 1)

    with pytest.raises(CaptureError, match=r"replaces \.grad"):
        run()
    job.close()


def test_hooks_on_the_step_that_are_added_later_are_refused(device: torch.device) -> None:
    job = Job(device, True, plain_step)
    for _ in range(5):
        job.run()
    job.optimizer.register_step_post_hook(lambda *_: None)

    def run() -> None:
        for _ in range(5):
            job.run()

    with pytest.raises(CaptureError, match="hooks on its step"):
        run()
    job.close()


class Stateful(nn.Linear):
    """Keeps something in Python from call to call."""

    def __init__(self, kind: str) -> None:
        super().__init__(8, 4)
        self.kind, self.count, self.previous, self.dice = kind, 0, None, random.Random(0)

    def forward(self, values: Tensor) -> Tensor:
        result = super().forward(values)
        if self.kind == "count":
            self.count += 1
            return result * min(1.0, self.count / 8)
        if self.kind == "carry":
            kept, self.previous = self.previous, result.detach()
            return result if kept is None else result + kept
        return result * self.dice.random()


def refusal(device: torch.device, make: Callable[[Job], Loop], *args: Any) -> str:
    job = Job(device, True, make)
    for _ in range(3):
        job.step(job.batch(), *args)
    with pytest.raises(CaptureError) as caught:
        job.step(job.batch(), *args)
    job.close()
    return caught.value.what


@pytest.mark.parametrize("kind", ["count", "carry", "dice"])
def test_python_state_of_modules_is_refused(device: torch.device, kind: str) -> None:
    def make(job: Job) -> Loop:
        torch.manual_seed(0)
        job.model = Stateful(kind).to(device)
        job.optimizer = torch.optim.AdamW(job.model.parameters(), lr=2.0**-7, fused=True)
        return plain_step(job)

    assert {"count": "count", "carry": "previous", "dice": "dice"}[kind] in refusal(device, make)


def test_writing_into_an_argument_is_refused(device: torch.device) -> None:
    def make(job: Job) -> Loop:
        step = plain_step(job)

        def adding(batch: tuple[Tensor, Tensor], total: Tensor) -> Tensor:
            loss: Tensor = step(batch)
            total.add_(loss)
            return loss

        return adding

    assert "writes into its arguments" in refusal(device, make, torch.zeros((), device=device))


def test_setting_training_flags_is_refused(device: torch.device) -> None:
    def make(job: Job) -> Loop:
        step = plain_step(job)

        def training(batch: tuple[Tensor, Tensor]) -> Tensor:
            job.model.train()
            loss: Tensor = step(batch)
            return loss

        return training

    job = Job(device, True, make)

    def run() -> None:
        for _ in range(4):
            job.model.eval()
            job.run()

    with pytest.raises(CaptureError, match="training flags"):
        run()
    job.close()


class Phase(enum.Enum):
    WARM = 1.0
    COLD = 0.5


@pytest.mark.parametrize(
    ("kept", "told"),
    [("array", "(its content)"), ("phase", "(<Phase.WARM: 1.0> before, <Phase.COLD: 0.5> after)")],
)
def test_other_values_of_python_that_a_run_changes_are_refused(device: torch.device, kept: str, told: str) -> None:
    state: dict[str, Any] = {"array": np.ones(1), "phase": Phase.WARM}

    def make(job: Job) -> Loop:
        step = plain_step(job)

        def changing(batch: tuple[Tensor, Tensor]) -> Tensor:
            if kept == "array":
                state["array"][0] += 1.0
            else:
                state["phase"] = Phase.COLD if state["phase"] is Phase.WARM else Phase.WARM
            loss: Tensor = step((batch[0] * float(state["array"][0] * state["phase"].value), batch[1]))
            return loss

        return changing

    assert refusal(device, make).startswith(f"each run changes state.{kept} {told}")


def test_a_step_that_freezes_in_turns_is_refused(device: torch.device) -> None:
    def make(job: Job) -> Loop:
        step = plain_step(job)
        first = next(job.model.parameters())

        def freezing(batch: tuple[Tensor, Tensor]) -> Tensor:
            first.requires_grad_(not first.requires_grad)
            loss: Tensor = step(batch)
            return loss

        return freezing

    assert "which parameters want a gradient" in refusal(device, make)


def test_a_step_that_freezes_and_thaws_again_is_captured(device: torch.device) -> None:
    def make(job: Job) -> Loop:
        step = plain_step(job)
        first = next(job.model.parameters())

        def freezing(batch: tuple[Tensor, Tensor]) -> Tensor:
            first.requires_grad_(False)
            hidden = job.model(batch[0]).detach()
            first.requires_grad_(True)
            loss: Tensor = step((batch[0] + hidden.mean(), batch[1]))
            return loss

        return freezing

    def script(job: Job) -> None:
        for _ in range(6):
            job.run()

    job = compared(device, make, script)
    assert replays(job) == 3
    job.close()


def test_a_loss_that_is_to_be_used_outside_is_refused(device: torch.device) -> None:
    def make(job: Job) -> Loop:
        return lambda batch: nn.functional.mse_loss(job.model(batch[0]), batch[1])

    assert "wants a gradient" in refusal(device, make)


def test_a_module_of_jit_is_refused_by_name(device: torch.device) -> None:
    def make(job: Job) -> Loop:
        job.model = torch.jit.script(job.model)  # type: ignore[no-untyped-call]
        return plain_step(job)

    assert "modules of torch.jit cannot be captured" in refusal(device, make)
