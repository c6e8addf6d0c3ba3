"""A capture of a whole step that fails leaves everything as it was before the call, wherever in the step it fails."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphstep
from graphstep.errors import CaptureError

POINTS = ("forward", "before the backward", "unscaled", "stepped", "at the end")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.dropout = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.2)
        self.outer = nn.Linear(16, 4)
        self.latest: Any = None

    def forward(self, values: Tensor, fail: Callable[[str, Tensor], None]) -> Tensor:
        hidden: Tensor = self.dropout(self.norm(self.inner(values)).relu())
        self.latest = "changed"
        fail("forward", hidden)
        return self.outer(hidden)


class Job:
    def __init__(self, device: torch.device, point: str, how: Callable[[Tensor], Any]) -> None:
        torch.manual_seed(0)
        self.device, self.point, self.how = device, point, how
        self.model = Net().to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2.0**-7, fused=True)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**6, growth_interval=3)
        self.data = torch.Generator().manual_seed(1)
        self.fails = True
        self.engine: Any = None

    def graph(self, **options: Any) -> Any:
        step = graphstep.graph_step(self.step, **options)
        self.engine = step.session.engine
        return step

    def fail(self, point: str, value: Tensor) -> None:
        if point == self.point and self.fails and self.engine is not None and self.engine.is_capturing:
            self.how(value)

    def step(self, values: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(values, self.fail).square().mean()
        self.fail("before the backward", loss)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        self.fail("unscaled", loss)
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.scaler.step(self.optimizer)
        self.fail("stepped", loss)
        self.scaler.update()
        self.fail("at the end", loss)
        return loss.detach()

    def batch(self) -> Tensor:
        return torch.randn(6, 8, generator=self.data).to(self.device)

    def state(self) -> dict[str, Any]:
        taken: dict[str, Any] = {name: value.clone() for name, value in self.model.state_dict().items()}
        for index, state in enumerate(self.optimizer.state.values()):
            taken.update((f"{index} {key}", value.clone()) for key, value in state.items())
        for name, parameter in self.model.named_parameters():
            taken[f"{name} grad"] = None if parameter.grad is None else parameter.grad.clone()
        taken["scale"] = self.scaler.get_scale()
        taken["growth"] = self.scaler._get_growth_tracker()
        taken["lr"] = self.optimizer.param_groups[0]["lr"]
        taken["latest"] = self.model.latest
        taken["rng"] = torch.get_rng_state()
        if self.device.type == "cuda":
            taken["cuda rng"] = torch.cuda.get_rng_state()
        return taken


def differing(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    assert mine.keys() == theirs.keys()
    found = []
    for key, one in mine.items():
        other = theirs[key]
        same = torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one is other
        found += [] if same or one == other else [key]
    return found


def reads(value: Tensor) -> None:
    value.sum().item()


def raises(value: Tensor) -> None:
    raise ValueError("not in a capture")


HOWS = {"host read": reads, "exception": raises}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("point", POINTS)
def test_with_auto_the_job_goes_on_as_if_nothing_had_been(device: torch.device, point: str, how: str) -> None:
    traces = []
    for is_graphed in (False, True):
        job = Job(device, point, HOWS[how])
        step: Any = job.graph(policy="auto") if is_graphed else job.step
        torch.manual_seed(3)
        trace = []
        for _ in range(8):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loss = step(job.batch())
            trace.append({"loss": loss, **job.state()})
        traces.append(trace)
        if is_graphed:
            row = step.report().rows[0]
            assert row.num_replays == 0
            assert any("it cannot be captured" in reason for reason in row.eager_calls)
            step.close()
    for mine, theirs in zip(*traces, strict=True):
        assert differing(mine, theirs) == []


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("point", POINTS)
def test_with_required_it_stops_and_leaves_no_trace(device: torch.device, point: str, how: str) -> None:
    jobs = [Job(device, point, HOWS[how]) for _ in range(2)]
    job = jobs[0]
    step: Any = job.graph()
    torch.manual_seed(3)
    for _ in range(3):
        step(job.batch())
    before = job.state()
    with pytest.raises((CaptureError, ValueError)) as caught:
        step(job.batch())
    if how == "host read":
        assert "test_failed_captures.py" in caught.value.where  # type: ignore[union-attr]
        assert "item()" in caught.value.where  # type: ignore[union-attr]
    else:
        assert "not in a capture" in str(caught.value)
    assert differing(before, job.state()) == []
    assert step.report().num_recordings == 0
    # The same step may be captured later, and is then what it would have been.
    job.fails = False
    for _ in range(4):
        step(job.batch())
    assert step.report().rows[0].num_replays >= 2
    other = jobs[1]
    torch.manual_seed(3)
    for index in range(8):
        batch = other.batch()
        if index != 3:
            other.step(batch)
    assert differing(job.state(), other.state()) == []
    step.close()


def test_a_warmup_call_that_fails_counts_for_nothing(device: torch.device) -> None:
    traces = []
    for is_graphed in (False, True):
        job = Job(device, "", reads)
        step: Any = job.graph() if is_graphed else job.step
        trace = []
        torch.manual_seed(3)
        for index in range(8):
            if index == 2:
                with pytest.raises(RuntimeError):
                    step(torch.zeros(6, 7, device=device))
                with pytest.raises(RuntimeError):
                    step(torch.zeros(6, 7, device=device))
            trace.append({"loss": step(job.batch()), **job.state()})
        traces.append(trace)
        if is_graphed:
            # The call that failed has dropped the gradients: one further call shows what the step does with some.
            assert step.report().rows[0].num_replays == 4, step.report().rows[0].eager_calls
            step.close()
    for mine, theirs in zip(*traces, strict=True):
        assert differing(mine, theirs) == []
