"""What a loop changes between the last warmup run of a step and its capture, and between captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphstep
from graphstep.capture.session import GraphSession
from graphstep.strategies import FullCudaGraphWrapper

NUM_STEPS = 12
WARMUP = 3


class Job:
    """A step with everything that it needs; a change is made before one of its calls."""

    def __init__(self, device: torch.device, is_graphed: bool, *, set_to_none: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(device)
        self.head = nn.Linear(3, 3).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2.0**-6, fused=True)
        self.device, self.set_to_none, self.uses_head = device, set_to_none, False
        self.session = GraphSession(device)
        self.call: Any = graphstep.graph_step(self.step, session=self.session) if is_graphed else self.step
        self.data = torch.Generator().manual_seed(1)
        self.kept: list[Tensor] = []
        self.trace: list[Tensor] = []

    def step(self, values: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        found = self.model(values)
        loss: Tensor = (self.head(found) if self.uses_head else found).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def run(self) -> None:
        self.trace.append(self.call(torch.randn(5, 4, generator=self.data).to(self.device)).clone())
        parameters = [*self.model.parameters(), *self.head.parameters()]
        self.trace += [each.detach().clone() for each in parameters]
        self.trace += [each.grad.clone() for each in parameters if each.grad is not None]
        self.trace += [each.clone() for each in self.kept]


def frozen(job: Job) -> None:
    job.model[0].bias.requires_grad_(False)
    job.model[0].bias.grad = None


def another_branch(job: Job) -> None:
    job.uses_head = not job.uses_head


def added_group(job: Job) -> None:
    if len(job.optimizer.param_groups) == 1:
        job.optimizer.add_param_group({"params": list(job.head.parameters())})
    job.uses_head = True


def loaded(job: Job) -> None:
    state = torch.utils._pytree.tree_map(
        lambda value: value.clone() if isinstance(value, Tensor) else value, job.optimizer.state_dict()
    )
    job.optimizer.load_state_dict(state)


def with_other_state(job: Job) -> None:
    for group in job.optimizer.param_groups:
        group["amsgrad"] = True
    for parameter in job.model.parameters():
        if "exp_avg_sq" in job.optimizer.state[parameter]:
            state = job.optimizer.state[parameter]
            state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg_sq"])


CHANGES: list[Callable[[Job], None]] = [frozen, another_branch, added_group, loaded, with_other_state]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("before", [WARMUP - 1, WARMUP, WARMUP + 1])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_at_any_time(device: torch.device, change: Any, before: int, set_to_none: bool) -> None:
    jobs = [Job(device, is_graphed, set_to_none=set_to_none) for is_graphed in (False, True)]
    for job in jobs:
        for index in range(NUM_STEPS):
            if index == before:
                change(job)
            job.run()
    plain, graphed = jobs
    assert len(plain.trace) == len(graphed.trace)
    assert all(map(torch.equal, plain.trace, graphed.trace))
    assert graphed.session.report().rows[0].num_replays >= NUM_STEPS - before - 3
    graphed.session.close()


def test_parameters_that_are_frozen_in_turns_are_never_captured_as_they_were(device: torch.device) -> None:
    plain, graphed = (Job(device, is_graphed) for is_graphed in (False, True))

    def train(job: Job) -> None:
        for index in range(NUM_STEPS):
            job.model[0].requires_grad_(index % 2 == 0)
            job.model[2].requires_grad_(index % 2 == 1)
            job.run()

    train(plain)
    with pytest.warns(UserWarning, match=r"step is not captured, because .* changes between its calls"):
        train(graphed)
    assert all(map(torch.equal, plain.trace, graphed.trace))
    graphed.session.close()


@pytest.mark.parametrize("before", [WARMUP, WARMUP + 1, WARMUP + 2])
@pytest.mark.parametrize("instead", [None, "another tensor"])
@pytest.mark.parametrize("reset", [False, True])
def test_a_gradient_that_is_kept_stays_where_the_loop_takes_it_away(
    device: torch.device, before: int, instead: str | None, reset: bool
) -> None:
    """The graph writes where it lay; so it gets memory of its own, whether or not another one takes its place."""
    jobs = [Job(device, is_graphed, set_to_none=False) for is_graphed in (False, True)]
    for job in jobs:
        for index in range(NUM_STEPS):
            if index == before:
                for parameter in job.model.parameters():
                    assert parameter.grad is not None
                    job.kept.append(parameter.grad)
                    parameter.grad = None if instead is None else torch.zeros_like(parameter)
                if reset and hasattr(job.call, "reset_cuda_graph"):
                    job.call.reset_cuda_graph()
            job.run()
    plain, graphed = jobs
    assert len(plain.trace) == len(graphed.trace)
    assert all(map(torch.equal, plain.trace, graphed.trace))
    graphed.session.close()


def test_an_optimizer_graph_leaves_a_kept_gradient_alone(device: torch.device) -> None:
    traces = []
    for is_graphed in (False, True):
        job = Job(device, False)
        graphed = graphstep.OptimizerGraph(job.optimizer, session=job.session)
        kept: list[Tensor] = []
        for index in range(NUM_STEPS):
            job.optimizer.zero_grad()
            job.model(torch.randn(5, 4, generator=job.data).to(device)).square().mean().backward()
            if index in (WARMUP, WARMUP + 2):
                kept.append(job.model[0].weight.grad)
            graphed.step() if is_graphed else job.optimizer.step()
            job.trace += [*(each.detach().clone() for each in (*job.model.parameters(), *kept))]
        traces.append(job.trace)
        job.session.close()
    assert all(map(torch.equal, *traces))


def test_graphs_of_one_session_that_are_captured_anew_share_their_gradients(device: torch.device) -> None:
    """The other graph still writes where gradients have been, so that one that is kept gets memory of its own."""

    def forward_backward(*, data_iterator: Any, model: nn.Module, num_microbatches: int, forward_only: bool) -> Tensor:
        loss: Tensor = model(next(data_iterator)).square().mean()
        loss.backward()
        return loss.detach()

    traces = []
    for is_graphed in (False, True):
        job = Job(device, False)
        wrapper = FullCudaGraphWrapper(forward_backward, model=job.model, session=job.session)
        graphed = graphstep.OptimizerGraph(job.optimizer, session=job.session)
        for index in range(NUM_STEPS):
            if index == WARMUP + 2:
                job.optimizer.param_groups[0]["betas"] = (0.8, 0.9)
            if index == WARMUP + 5:
                job.kept.append(job.model[0].weight.grad)
            job.optimizer.zero_grad()
            batch = iter([torch.randn(5, 4, generator=job.data).to(device)])
            if is_graphed:
                job.trace.append(wrapper(data_iterator=batch, num_microbatches=1))
                graphed.step()
            else:
                call = {"model": job.model, "num_microbatches": 1, "forward_only": False}
                job.trace.append(forward_backward(data_iterator=batch, **call))
                job.optimizer.step()
            job.trace += [each.detach().clone() for each in (*job.model.parameters(), *job.kept)]
        traces.append(job.trace)
        job.session.close()
    assert all(map(torch.equal, *traces))


def test_evaluation_with_parameters_that_are_frozen_and_thawed(device: torch.device) -> None:
    """They compute the same: the graph stays."""
    job = Job(device, False)

    @graphstep.graph_step
    @torch.no_grad()
    def evaluate(values: Tensor) -> Tensor:
        found: Tensor = job.model(values)
        return found.square().mean()

    for index in range(9):
        job.model.requires_grad_(index % 3 != 2)
        values = torch.randn(5, 4, generator=job.data).to(device)
        with torch.no_grad():
            expected = job.model(values).square().mean()
        assert torch.equal(evaluate(values), expected)
    assert evaluate.report().rows[0].num_replays == 6
    evaluate.close()
