"""What only a GPU shows of whole steps: that nothing waits for it, and compiled kernels in a graph."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.strategies.step_jobs import Job, Loop, plain_step
from torch import Tensor, nn

import graphstep
from graphstep.capture.host_inputs import HostInputs
from graphstep.strategies import FullCudaGraphWrapper

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
_LONG = 200_000_000
"""Cycles: some tenths of a second."""


@contextmanager
def waits_refused() -> Iterator[None]:
    """Within it, every wait of the host for the device that torch knows of is an error."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_a_hundred_steps_in_one_graph_never_wait() -> None:
    job = Job(CUDA, True, plain_step)
    batches = [job.batch() for _ in range(4)]
    for batch in batches * 2:
        job.step(batch)
    replays = job.step.report().rows[0].num_replays
    with waits_refused():
        losses = [job.step(batches[number % 4]) for number in range(100)]
    assert job.step.report().rows[0].num_replays == replays + 100
    assert len({float(loss) for loss in losses}) > 90
    job.close()


def forward_backward(
    *, data_iterator: Iterator[Any], model: nn.Module, num_microbatches: int, forward_only: bool
) -> Tensor:
    losses = []
    for _ in range(num_microbatches):
        values, targets = next(data_iterator)
        loss = nn.functional.mse_loss(model(values), targets)
        if not forward_only:
            loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def test_a_hundred_iterations_of_pinned_batches_never_wait() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(CUDA)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    batches = [(torch.randn(6, 8).pin_memory(), torch.randn(6, 4).pin_memory()) for _ in range(4)]
    with graphstep.GraphSession(CUDA) as session:
        wrapper = FullCudaGraphWrapper(forward_backward, model=model, session=session, cuda_graph_warmup_steps=2)

        def run(number: int) -> Tensor:
            given = iter([batches[number % 4], batches[(number + 1) % 4]])
            result: Tensor = wrapper(data_iterator=given, num_microbatches=2, forward_only=False)
            return result

        for number in range(6):
            run(number)
        replays = wrapper.report().rows[0].num_replays
        with waits_refused():
            losses = [run(number) for number in range(100)]
        assert wrapper.report().rows[0].num_replays == replays + 100
        model.requires_grad_(False)
        expected = [nn.functional.mse_loss(model(v.to(CUDA)), t.to(CUDA)) for v, t in batches]
        for number, found in enumerate(losses):
            assert torch.equal(found, torch.stack([expected[number % 4], expected[(number + 1) % 4]]))


@pytest.mark.parametrize("is_pinned", [True, False])
def test_the_next_batch_arrives_while_the_graph_of_this_one_runs(
    monkeypatch: pytest.MonkeyPatch, is_pinned: bool
) -> None:
    """Told by events: the copy is through before the graph that was launched before it."""
    arrived: list[torch.cuda.Event] = []
    load = HostInputs.load

    def noted(self: HostInputs, sources: Sequence[Tensor]) -> None:
        load(self, sources)
        arrived.append(torch.cuda.Event())
        arrived[-1].record(self._stream)

    def slow(*, data_iterator: Iterator[Tensor], **_: Any) -> Tensor:
        torch.cuda._sleep(_LONG)
        return next(data_iterator).sum()

    monkeypatch.setattr(HostInputs, "load", noted)
    batches = [torch.full((64, 128), float(number)) for number in range(8)]
    if is_pinned:
        batches = [batch.pin_memory() for batch in batches]
    with graphstep.GraphSession(CUDA) as session, torch.no_grad():
        wrapper = FullCudaGraphWrapper(slow, model=nn.Identity(), session=session, cuda_graph_warmup_steps=1)
        losses, done = [], torch.cuda.Event()
        for number, batch in enumerate(batches):
            torch.cuda.synchronize()
            if number == 7:
                losses.append(wrapper(data_iterator=iter([batches[0]]), num_microbatches=1, forward_only=True))
                done.record()
            losses.append(wrapper(data_iterator=iter([batch]), num_microbatches=1, forward_only=True))
        arrived[-1].synchronize()
        assert not done.query(), "the graph before should still run"
        assert wrapper.report().rows[0].num_replays == 8
        assert [float(loss) for loss in losses] == [64 * 128 * value for value in (0, 1, 2, 3, 4, 5, 6, 0, 7)]


def compiled_step(job: Job) -> Loop:
    job.model.dropout.p = 0.0
    forward = torch.compile(job.model)

    def step(batch: tuple[Tensor, Tensor]) -> Tensor:
        values, targets = batch
        job.optimizer.zero_grad()
        loss = nn.functional.mse_loss(forward(values), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(job.model.parameters(), 0.5)
        job.optimizer.step()
        return loss.detach()

    return step


class Wide(nn.Module):
    """Its activations are larger than its weights."""

    size, num_rows = 256, 2**14

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(self.size, self.size) for _ in range(6))

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = nn.functional.gelu(layer(values))
        return values.square().mean()


def test_a_compiled_step_holds_no_activations_beside_the_pool() -> None:
    """The run that is watched before the capture sees memory that compiled code makes past the dispatcher."""
    held = []
    for is_compiled in (False, True):
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        model = Wide().to(CUDA)
        forward = torch.compile(model) if is_compiled else model

        def step(values: Tensor, model: nn.Module = model, forward: Any = forward) -> Tensor:
            model.zero_grad()
            loss: Tensor = forward(values)
            loss.backward()
            return loss.detach()

        graphed = graphstep.graph_step(step, modules=[model])
        for _ in range(6):
            graphed(torch.randn(model.num_rows, model.size, device=CUDA))
        assert graphed.report().rows[0].num_replays == 3
        gc.collect()
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated() - before)
        graphed.close()
        torch.compiler.reset()
        del graphed, step, forward, model
        gc.collect()
    one_activation = 4 * Wide.num_rows * Wide.size
    assert held[1] < held[0] + one_activation


def test_compiled_kernels_in_one_graph_give_what_those_outside_give() -> None:
    """But for rounding: each compilation chooses the order of its sums by timing. The bias before a normalization moves
    by rounding alone, so that losses are compared, and not weights.
    """
    traces = []
    for is_graphed in (False, True):
        job = Job(CUDA, is_graphed, compiled_step)
        losses = [job.run().clone() for _ in range(8)]
        if is_graphed:
            assert job.step.report().rows[0].num_replays >= 4
        job.close()
        torch.compiler.reset()
        traces.append(losses)
    plain, graphed = traces
    assert len(set(map(float, plain))) == len(plain)
    torch.testing.assert_close(graphed, plain)
