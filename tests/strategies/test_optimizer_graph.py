"""The optimizer step as a graph: equal to the step without it, through schedules, loads and gradients that move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphstep
from graphstep.errors import CaptureError, LifecycleError
from graphstep.strategies.added_decay import type_of_number

Build = Callable[[Any], torch.optim.Optimizer]


class Rosenbrock(torch.optim.Optimizer):
    """An optimizer of somebody's own, with a step that reads nothing back."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "capturable": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if "sum" not in state:
                        state["sum"] = torch.zeros_like(parameter)
                    state["sum"].add_(parameter.grad.square())
                    parameter.sub_(group["lr"] * parameter.grad / (state["sum"].sqrt() + 1e-8))


class Job:
    def __init__(self, device: torch.device, build: Build, is_graphed: bool, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).to(device)
        self.device = device
        self.optimizer = build(self.model.parameters())
        self.graph = graphstep.OptimizerGraph(self.optimizer, **options) if is_graphed else None
        self.data = torch.Generator().manual_seed(1)
        self.trace: list[dict[str, Tensor]] = []

    def backward(self, *, layers: slice = slice(None)) -> None:
        values = torch.randn(4, 6, generator=self.data).to(self.device)
        for layer in self.model[layers]:
            values = layer(values)
        values.square().mean().backward()

    def step(self) -> None:
        if self.graph is not None:
            self.graph.step()
        else:
            self.optimizer.step()
        taken = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        for index, state in enumerate(self.optimizer.state.values()):
            taken.update((f"{index} {key}", v.clone()) for key, v in state.items() if isinstance(v, Tensor))
        taken.update((f"grad {n}", p.grad.clone()) for n, p in self.model.named_parameters() if p.grad is not None)
        self.trace.append(taken)

    def num_replays(self) -> int:
        assert self.graph is not None
        return sum(row.num_replays for row in self.graph.report().rows)


def compared(device: torch.device, build: Build, script: Callable[[Job], None], **options: Any) -> Job:
    jobs = [Job(device, build, is_graphed, **options) for is_graphed in (False, True)]
    for job in jobs:
        script(job)
    for mine, theirs in zip(jobs[0].trace, jobs[1].trace, strict=True):
        assert mine.keys() == theirs.keys()
        assert [key for key in mine if not torch.equal(mine[key], theirs[key])] == []
    assert jobs[1].graph is not None
    jobs[1].graph.close()
    return jobs[1]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2.0**-6, fused=True, weight_decay=0.1)


BUILDS: dict[str, Build] = {
    "AdamW": adamw,
    "AdamW, capturable": lambda p: torch.optim.AdamW(p, lr=2.0**-6, capturable=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=2.0**-6, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=2.0**-4, fused=True, momentum=0.9),
    "one's own": lambda p: Rosenbrock(p, lr=2.0**-4),
    "two groups": lambda p: torch.optim.AdamW(
        [{"params": group, "lr": 2.0**-power} for power, group in enumerate(p, 4)], fused=True
    ),
}


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_steps_equal_eager(device: torch.device, name: str, set_to_none: bool) -> None:
    if name == "AdamW, capturable" and device.type == "cpu":
        pytest.skip("torch has no capturable AdamW on the CPU")

    def script(job: Job) -> None:
        schedule = torch.optim.lr_scheduler.StepLR(job.optimizer, step_size=2, gamma=0.5)
        for _ in range(9):
            job.optimizer.zero_grad(set_to_none=set_to_none)
            job.backward()
            job.step()
            schedule.step()

    assert compared(device, BUILDS[name], script).num_replays() == 6


def test_one_launch_for_clip_and_step(device: torch.device) -> None:
    def script(job: Job) -> None:
        for _ in range(6):
            job.optimizer.zero_grad(set_to_none=False)
            job.backward()
            if job.graph is None:
                nn.utils.clip_grad_norm_(job.model.parameters(), 0.01)
            job.step()

    jobs = [Job(device, adamw, is_graphed=False)]
    graphed = Job(device, adamw, is_graphed=False)

    def update() -> Tensor:
        norm = nn.utils.clip_grad_norm_(graphed.model.parameters(), 0.01)
        graphed.optimizer.step()
        return norm

    graphed.graph = graphstep.OptimizerGraph(graphed.optimizer, update=update)
    jobs.append(graphed)
    for job in jobs:
        script(job)
    for mine, theirs in zip(jobs[0].trace, jobs[1].trace, strict=True):
        assert [key for key in mine if not torch.equal(mine[key], theirs[key])] == []
    norms = [graphed.graph.step() for _ in range(2)]
    assert norms[0] is not norms[1]
    assert graphed.num_replays() == 5
    graphed.graph.close()


def test_parameters_without_a_gradient_are_left_out(device: torch.device) -> None:
    """Weight decay and moments are not applied to them; another set is another graph."""

    def script(job: Job) -> None:
        for index in range(16):
            job.optimizer.zero_grad()
            job.backward(layers=slice(0, 1) if index % 2 else slice(None))
            job.step()

    job = compared(device, adamw, script, cuda_graph_warmup_steps=2)
    assert job.num_replays() == 12


def test_state_that_is_loaded_is_followed(device: torch.device) -> None:
    def script(job: Job) -> None:
        for index in range(14):
            if index == 7:
                job.optimizer.load_state_dict(job.optimizer.state_dict())
            job.optimizer.zero_grad(set_to_none=False)
            job.backward()
            job.step()

    assert compared(device, adamw, script).num_replays() == 4 + 4


def test_a_number_that_changes_has_it_captured_anew(device: torch.device) -> None:
    def script(job: Job) -> None:
        for index in range(10):
            if index == 6:
                job.optimizer.param_groups[0]["betas"] = (0.5, 0.5)
            job.optimizer.zero_grad(set_to_none=False)
            job.backward()
            job.step()

    assert compared(device, adamw, script).num_replays() == 6


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "two groups"])
def test_weight_decay_with_a_schedule_is_followed(device: torch.device, name: str) -> None:
    """Gradients are as the loop has made them after each step, whichever the step was given."""

    def script(job: Job) -> None:
        for index in range(9):
            for each, group in enumerate(job.optimizer.param_groups, 1):
                group["weight_decay"] = 0.1 * each / (1 + index)
            job.optimizer.zero_grad(set_to_none=index % 2 == 0)
            job.backward()
            job.step()

    job = compared(device, BUILDS[name], script)
    may_differ = name == "Adam" and device.type == "cuda"  # See `type_of_number`: it is captured anew then.
    is_followed = not may_differ or type_of_number(name, {"fused": True}, torch.float32, device) is not None
    assert job.num_replays() == (6 if is_followed else 3)


def test_no_warmup_makes_the_state_first(device: torch.device) -> None:
    def script(job: Job) -> None:
        for _ in range(4):
            job.optimizer.zero_grad(set_to_none=False)
            job.backward()
            job.step()

    assert compared(device, adamw, script, cuda_graph_warmup_steps=0).num_replays() == 3


def test_what_reads_back_is_refused_before_anything_changes(device: torch.device) -> None:
    job = Job(device, lambda p: torch.optim.AdamW(p, lr=1e-3), is_graphed=True, cuda_graph_warmup_steps=1)
    job.backward()
    job.step()
    before = {name: value.clone() for name, value in job.model.state_dict().items()}
    with pytest.raises(CaptureError, match="AdamW reads"):
        job.step()
    assert all(torch.equal(value, before[name]) for name, value in job.model.state_dict().items())
    assert job.graph is not None
    job.graph.close()
    with pytest.raises(LifecycleError):
        job.graph.step()


def test_beside_local_graphs(device: torch.device) -> None:
    """Gradients that graphs fill stay where they are: nothing is copied."""

    def script(job: Job) -> None:
        manager = None
        if job.graph is not None:
            job.graph.close()
            manager = graphstep.attach(job.model, regions={"*": "layer"})
            job.graph = graphstep.OptimizerGraph(job.optimizer, session=manager.session)
        for _ in range(8):
            job.optimizer.zero_grad()
            job.backward()
            job.step()
        if manager is not None:
            assert {row.name for row in manager.report().rows if row.num_replays} > {"optimizer"}

    compared(device, adamw, script)
