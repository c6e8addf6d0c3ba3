"""Whole steps of models in DistributedDataParallel, wherever it was built and ran before: captured, or said why not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.strategies.models import Decoder
from tests.strategies.test_data_parallel import doubled
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import graphstep
from graphstep.capture.session import GraphSession
from graphstep.config.switches import CapturePolicy
from graphstep.engine import data_parallel
from graphstep.errors import CaptureError
from graphstep.strategies import FullCudaGraphWrapper
from graphstep.strategies.leaf_streams import SET_UP_AGAIN, LeafStreams

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")

NUM_STEPS = 18
BUILT_ON = ("the capture stream", "a stream of its own", "the default stream")


@pytest.fixture(autouse=True)
def one_process(device: torch.device) -> Iterator[None]:
    """A group of one: that reductions happen, the communication hook shows, which doubles gradients."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stream_context(built_on: str, session: GraphSession) -> Any:
    if built_on == "the capture stream":
        return session.engine.capture_stream()
    if built_on == "a stream of its own" and session.device.type == "cuda":
        return torch.cuda.stream(torch.cuda.Stream())
    return nullcontext()


class Job:
    """A model in DDP that has run one eager step on the caller's stream before anything is captured."""

    def __init__(self, device: torch.device, session: GraphSession, built_on: str, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        inner = Decoder(dropout=0.2).to(device)
        with stream_context(built_on, session):
            self.model = DistributedDataParallel(inner, **options)
        if device.type == "cuda":
            torch.cuda.synchronize()
        self.model.register_comm_hook(None, doubled)
        self.optimizer = torch.optim.SGD(inner.parameters(), lr=2.0**-4, momentum=0.5, fused=True)
        self.data = torch.Generator().manual_seed(1)
        self.device, self.trace = device, []
        self.note(self.step(self.batch()))

    def batch(self) -> dict[str, Tensor]:
        drawn = torch.randint(11, (2, 7), generator=self.data).to(self.device)
        return {"tokens": drawn[:, :-1].contiguous(), "labels": drawn[:, 1:].contiguous()}

    def step(self, batch: dict[str, Tensor]) -> Tensor:
        self.optimizer.zero_grad(set_to_none=False)
        loss: Tensor = self.model(batch["tokens"], batch["labels"])
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def forward_backward(
        self, *, data_iterator: Iterator[Any], model: Any, num_microbatches: int, forward_only: bool = False
    ) -> Tensor:
        losses = []
        for index in range(num_microbatches):
            batch = next(data_iterator)
            with nullcontext() if index == num_microbatches - 1 else model.no_sync():
                loss = model(batch["tokens"], batch["labels"])
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses)

    def note(self, loss: Tensor) -> None:
        parts = [loss, *self.model.parameters(), *(p.grad for p in self.model.parameters() if p.grad is not None)]
        self.trace.append([part.detach().clone() for part in parts])


def equal(mine: Job, theirs: Job) -> bool:
    return all(all(map(torch.equal, *pair)) for pair in zip(mine.trace, theirs.trace, strict=True))


def was_captured(report: Any, device: torch.device, built_on: str) -> bool:
    """After eleven forwards on a GPU, the one of the job included, or eleven of a wrapper that was set up again."""
    row = report.rows[0]
    if device.type == "cpu":
        return bool(row.num_replays == NUM_STEPS - 3)
    eager = {13, 12} if built_on == "the default stream" else {11, 12}
    return NUM_STEPS - row.num_replays in eager and (SET_UP_AGAIN in row.eager_calls) == (13 in eager)


OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "buckets": {"gradient_as_bucket_view": True}}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("built_on", BUILT_ON)
def test_graph_step(device: torch.device, built_on: str, options: str) -> None:
    jobs = []
    for is_graphed in (False, True):
        session = GraphSession(device)
        job = Job(device, session, built_on, OPTIONS[options])
        step: Any = graphstep.graph_step(job.step, session=session, policy="auto") if is_graphed else job.step
        torch.manual_seed(2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(NUM_STEPS):
                job.note(step(job.batch()))
        jobs.append(job)
        if is_graphed:
            assert was_captured(step.report(), device, built_on), step.report().rows[0].eager_calls
        session.close()
    assert equal(*jobs)


def read(gradient: Tensor) -> Tensor:
    """Another factor by a value on the host, which no graph can read."""
    return gradient * (0.5 if float(gradient.abs().sum()) > 2.0**-8 else 1.0)


@pytest.mark.parametrize("policy", ["auto", "required"])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_capture_that_fails_within_the_backward(options: str, policy: str) -> None:
    """On the CPU only: the wrapper would wait for the rest of that backward, and raise in its next forward."""
    device = torch.device("cpu")
    jobs: list[Job] = []
    refused: list[str] = []
    for is_graphed in (False, True):
        session = GraphSession(device)
        job = Job(device, session, "the capture stream", OPTIONS[options])
        next(job.model.module.layers.parameters()).register_hook(read)
        step: Any = graphstep.graph_step(job.step, session=session, policy=policy) if is_graphed else job.step
        torch.manual_seed(2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(10):
                batch = job.batch()
                try:
                    loss = step(batch)
                except CaptureError as error:
                    refused.append(error.what)
                    loss = step.eager(batch)
                job.note(loss)
            if is_graphed:
                assert step.report().rows[0].num_replays == 0
        jobs.append(job)
        session.close()
    assert equal(*jobs)
    assert bool(refused) == (policy == "required")
    assert all("on the host" in what for what in refused)


@pytest.mark.parametrize("built_on", BUILT_ON)
def test_full_iteration(device: torch.device, built_on: str) -> None:
    jobs = []
    for is_graphed in (False, True):
        session = GraphSession(device)
        job = Job(device, session, built_on, {})
        wrapper = FullCudaGraphWrapper(
            job.forward_backward, model=job.model, session=session, policy=CapturePolicy.auto
        )
        torch.manual_seed(2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(NUM_STEPS):
                job.optimizer.zero_grad(set_to_none=False)
                batches = iter([job.batch(), job.batch()])
                call: Any = wrapper if is_graphed else job.forward_backward
                model = {} if is_graphed else {"model": job.model}
                losses = call(data_iterator=batches, num_microbatches=2, **model)
                job.optimizer.step()
                job.note(losses)
        jobs.append(job)
        if is_graphed:
            assert was_captured(wrapper.report(), device, built_on), wrapper.report().rows[0].eager_calls
        wrapper.close()
    assert equal(*jobs)


def test_doubling_is_seen(device: torch.device) -> None:
    """Without the hook, the weights would be others: the reductions are in the graph."""
    session = GraphSession(device)
    job = Job(device, session, "the capture stream", {})
    plain = Decoder(dropout=0.2).to(device)
    plain.load_state_dict(job.model.module.state_dict())
    step = graphstep.graph_step(job.step, session=session)
    for _ in range(NUM_STEPS):
        batch = job.batch()
        step(batch)
    assert was_captured(step.report(), device, "the capture stream")
    with torch.no_grad():
        plain.load_state_dict(job.model.module.state_dict())
    batch = job.batch()
    torch.manual_seed(7)
    nn.Module.__call__(plain, **batch).backward()
    torch.manual_seed(7)
    step(batch)
    for mine, theirs in zip(job.model.parameters(), plain.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad * 2)
    session.close()


class _OnDefaultStream(LeafStreams):
    """As if the first eager run had shown that all gradients are accumulated on the default stream."""

    has_seen = False

    def run(self, function: Any, modules: Any, others: Any) -> tuple[Any, bool]:
        result = function()
        is_first, self.has_seen = not self.has_seen, True
        leaves = [p for module in modules for p in module._parameters.values() if p is not None]
        return result, is_first and self.set_right([*leaves, *others])


@pytest.mark.parametrize("options", OPTIONS)
def test_wrapper_of_the_default_stream_is_set_up_again(monkeypatch: pytest.MonkeyPatch, options: str) -> None:
    """Graphs and eager steps that go on with the same wrapper afterwards both reduce."""
    jobs = []
    for is_graphed in (False, True):
        session = GraphSession("cpu")
        job = Job(torch.device("cpu"), session, "the default stream", OPTIONS[options])
        reducer = job.model.reducer
        monkeypatch.setattr("graphstep.strategies.iteration_graphs.LeafStreams", _OnDefaultStream)
        step: Any = job.step
        if is_graphed:  # Its second forward, in which it rebuilds its buckets, is not what the capture repeats.
            step = graphstep.graph_step(job.step, session=session, cuda_graph_warmup_steps=4)
        torch.manual_seed(2)
        for _ in range(NUM_STEPS):
            job.note(step(job.batch()))
        if is_graphed:
            row = step.report().rows[0]
            assert row.num_replays == NUM_STEPS - 5
            assert dict(row.eager_calls) == {"warmup": 2, SET_UP_AGAIN: 3}
        assert (job.model.reducer is reducer) is not is_graphed
        for _ in range(2):
            job.note(job.step(job.batch()))
        session.close()
        jobs.append(job)
    assert equal(*jobs)


@pytest.mark.parametrize("options", OPTIONS)
def test_evaluation_between_steps(device: torch.device, options: str) -> None:
    """The wrapper notes that its last forward was none of training, which is no change of the step."""
    jobs = []
    for is_graphed in (False, True):
        session = GraphSession(device)
        job = Job(device, session, "the default stream", OPTIONS[options])
        step: Any = graphstep.graph_step(job.step, session=session) if is_graphed else job.step
        torch.manual_seed(2)
        for _ in range(NUM_STEPS):
            job.note(step(job.batch()))
            with torch.no_grad():
                batch = job.batch()
                job.note(job.model(batch["tokens"], batch["labels"]))
        if is_graphed:
            assert was_captured(step.report(), device, "the default stream"), step.report().rows[0].eager_calls
        session.close()
        jobs.append(job)
    assert equal(*jobs)


def test_wrapper_that_cannot_be_set_up_again_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    session = GraphSession("cpu")
    job = Job(torch.device("cpu"), session, "the default stream", {})
    # Held, so that each has one Python object for as long as this runs.
    nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in job.model.parameters()]
    monkeypatch.setattr(data_parallel, "why_not_anew", lambda _wrapper: "it is special")
    streams = LeafStreams(session)
    assert not streams.set_right(job.model.parameters())
    assert streams.problem == "it is special"
    after = [torch.autograd.graph.get_gradient_edge(p).node for p in job.model.parameters()]
    assert all(before is now for before, now in zip(nodes, after, strict=True))
    session.close()


def test_leaves_outside_of_wrappers_get_new_nodes() -> None:
    """Such as those of a loss that the loop has kept."""
    session, plain = GraphSession("cpu"), nn.Linear(3, 3)
    job = Job(torch.device("cpu"), session, "the default stream", {})
    kept = plain(torch.ones(2, 3)).sum()
    nodes = [id(torch.autograd.graph.get_gradient_edge(p).node) for p in plain.parameters()]
    reducer = job.model.reducer
    streams = LeafStreams(session)
    assert not streams.set_right(plain.parameters())
    assert job.model.reducer is reducer
    again = plain(torch.ones(2, 3)).sum()
    assert not {id(torch.autograd.graph.get_gradient_edge(p).node) for p in plain.parameters()} & set(nodes)
    (kept + again).backward()
    assert torch.equal(plain.bias.grad, torch.full((3,), 4.0))
    session.close()
