"""A backward pass that the step runs in a thread of its own is refused: a capture would miss it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.capture.test_gathered_gradients import Calls
from torch import Tensor, nn

import graphstep
from graphstep.capture.session import GraphSession
from graphstep.errors import CaptureError
from graphstep.strategies.full_iteration import FullCudaGraphWrapper
from graphstep.strategies.gradient_threads import gradient_threads_watched


def built(device: torch.device) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 3).to(device)


class Job:
    """A step that calls backward in another thread, or in its own."""

    def __init__(self, device: torch.device, *, zeroes: str, is_threaded: bool = True) -> None:
        self.model, self.zeroes, self.is_threaded = built(device), zeroes, is_threaded

    def step(self, x: Tensor) -> Tensor:
        if self.zeroes != "outside":
            self.model.zero_grad(set_to_none=self.zeroes == "to none")
        loss: Tensor = self.model(x).square().mean()
        if self.is_threaded:
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        else:
            loss.backward()
        return loss.detach()

    def run(self, step: Any, device: torch.device) -> list[Tensor]:
        found = []
        for number in range(7):
            if self.zeroes == "outside":
                self.model.zero_grad(set_to_none=False)
            drawn = torch.Generator().manual_seed(number)
            step(torch.randn(2, 3, generator=drawn).to(device))
            assert self.model.weight.grad is not None
            found.append(self.model.weight.grad.clone())
        return found


@pytest.mark.parametrize("zeroes", ["to none", "in place", "outside"])
def test_it_is_refused(zeroes: str, device: torch.device) -> None:
    job = Job(device, zeroes=zeroes)
    graphed = graphstep.graph_step(job.step, modules=[job.model])
    with pytest.raises(CaptureError, match="backward pass in another thread"):
        job.run(graphed, device)
    graphed.close()


def test_it_is_refused_without_warmup(device: torch.device) -> None:
    job = Job(device, zeroes="outside")

    def forward_backward(*, data_iterator: Any, model: nn.Module, num_microbatches: int, **_: Any) -> Tensor:
        return job.step(next(data_iterator))

    with GraphSession(device) as session:
        wrapper = FullCudaGraphWrapper(forward_backward, cuda_graph_warmup_steps=0, model=job.model, session=session)
        batch = torch.ones(2, 3, device=device)
        with pytest.raises(CaptureError, match="backward pass in another thread"):
            wrapper.forward_backward(data_iterator=iter([batch]), num_microbatches=1)


@pytest.mark.filterwarnings("ignore:.*runs eagerly")
@pytest.mark.parametrize("zeroes", ["to none", "in place", "outside"])
def test_with_auto_it_runs_eagerly(zeroes: str, device: torch.device) -> None:
    plain, job = Job(device, zeroes=zeroes), Job(device, zeroes=zeroes)
    graphed = graphstep.graph_step(job.step, modules=[job.model], policy="auto")
    assert all(map(torch.equal, job.run(graphed, device), plain.run(plain.step, device)))
    assert graphed.report().num_recordings == 0
    graphed.close()


@pytest.mark.parametrize("zeroes", ["to none", "in place", "outside"])
def test_in_its_own_thread_it_is_captured(zeroes: str, device: torch.device) -> None:
    plain, job = (Job(device, zeroes=zeroes, is_threaded=False) for _ in range(2))
    graphed = graphstep.graph_step(job.step, modules=[job.model])
    assert all(map(torch.equal, job.run(graphed, device), plain.run(plain.step, device)))
    assert graphed.report().num_recordings == 1
    graphed.close()


def test_gradients_that_were_seen(device: torch.device) -> None:
    model = built(device)
    with gradient_threads_watched(model.parameters()) as came_unseen, Calls():
        model(torch.ones(2, 3, device=device)).sum().backward()
    assert not came_unseen()
    with gradient_threads_watched(model.parameters()) as came_unseen:
        model(torch.ones(2, 3, device=device)).sum().backward()
    assert came_unseen()
    assert all(p._backward_hooks is None for p in model.parameters())
