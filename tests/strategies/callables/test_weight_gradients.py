"""Weight gradients with graphs of their own: computed in their turn, the same bits as eager, and never forgotten."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.strategies.callables.delayed import InPython, Several, calls_of, delayed, stepped, weight_gradients
from tests.strategies.callables.jobs import DTYPES, HIDDEN, Block, Job, compared
from tests.strategies.callables.pipelines import Pipeline, Rank, Small, order_of_rank
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from graphstep.capture.plan import Phase
from graphstep.capture.reasons import EagerReason
from graphstep.strategies.layer_order import order_of_layers
from graphstep.strategies.order_steps import max_in_flight


@pytest.fixture(autouse=True)
def frozen_only_for_the_test() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def insist_on_the_depth(rank: Rank) -> None:
    """Three recordings for each microbatch in flight."""
    depth = max_in_flight(rank.steps)
    assert rank.handle is not None
    expected = [3 * depth[chunk] for chunk, layers in enumerate(rank.chunks) for _ in layers]
    assert [row.num_recordings for row in rank.handle.report().rows] == expected


@pytest.mark.parametrize(
    ("num_stages", "num_chunks", "by"),
    [
        *((stages, chunks, by) for stages in (2, 4) for chunks in (1, 2) for by in (0, 1, 3)),
        *((8, chunks, by) for chunks in (1, 2) for by in (0, 2)),
        pytest.param(8, 4, 3, marks=pytest.mark.slow),
    ],
)
def test_every_microbatch_of_a_pipeline_is_as_eager(
    device: torch.device, num_stages: int, num_chunks: int, by: int
) -> None:
    def script(job: Job) -> None:
        is_large = num_stages * num_chunks > 8
        num_microbatches = num_stages if num_stages * num_chunks > 16 else 2 * num_stages
        orders = [
            delayed(order_of_rank(num_stages, rank, num_microbatches, num_chunks), by) for rank in range(num_stages)
        ]
        pipeline = Pipeline(
            job, num_stages, num_microbatches, num_chunks, orders=orders, build=Small if is_large else Block
        )
        pipeline.train(2 if is_large else 4)
        if job.graphs:
            for rank in pipeline.ranks:
                insist_on_the_depth(rank)
            assert job.reasons() == {}

    compared(device, script)


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("accumulates", [True, False])
@pytest.mark.parametrize("reuses", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_options_change_no_bit(
    device: torch.device, dtype: torch.dtype, reuses: bool, accumulates: bool, set_to_none: bool
) -> None:
    def script(job: Job) -> None:
        orders = [delayed(order_of_rank(2, rank, 4, 2), 1) for rank in range(2)]
        pipeline = Pipeline(
            job,
            2,
            4,
            2,
            orders=orders,
            layers=lambda rank, chunk: 1 + (rank + chunk) % 2,
            reuses=reuses,
            accumulate_param_grads=accumulates,
        )
        pipeline.train(set_to_none=set_to_none)
        assert job.reasons() == {}

    compared(device, script, dtype=dtype)


@pytest.mark.parametrize("layers", [[1, 1], [3, 1], [1, 3]])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_layers_of_a_backward_between_those_of_the_next_forward(
    device: torch.device, num_stages: int, layers: list[int]
) -> None:
    """Each layer has an id of its own; here none depends on another."""

    def script(job: Job) -> None:
        order = order_of_layers(order_of_rank(num_stages, 0, 4, 2), layers, delays_weight_gradients=True)
        rank = Rank(job, order, [[job.built(Block)] for _ in range(sum(layers))])
        for _ in range(3):
            found = []
            for step in rank.steps:
                if step.phase is Phase.FORWARD:
                    x = job.draw(requires_grad=True)
                    loss = rank.forward(step.chunk, step.microbatch, x).square().sum()
                    found += [x, loss.detach().clone()]
                    del loss
                elif step.phase is Phase.BACKWARD:
                    rank.backward(step.chunk, step.microbatch, job.draw(), None)
                else:
                    rank.weight_gradients(step.chunk, step.microbatch)
            job.note(found=found)
        if job.graphs:
            insist_on_the_depth(rank)

    compared(device, script)


# One callable.


ORDERS = [
    [1, -1, -1.5],
    [1, 1, -1, -1, -1.5, -1.5],
    [1, 1, -1, -1.5, 1, -1, -1, -1.5, -1.5],
    [1, -1, 1, -1.5, -1, -1.5],
]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("accumulates", [True, False])
def test_orders_of_one_chunk(device: torch.device, order: list[float], accumulates: bool) -> None:
    def script(job: Job) -> None:
        calls = calls_of(job, job.built(Block), order, accumulate_param_grads=accumulates)
        optimizer = job.optimizer()
        for _ in range(4):
            optimizer.zero_grad()
            stepped(job, calls, order)
            optimizer.step()

    compared(device, script, replays=4 * order.count(1))


def test_no_gradient_of_a_weight_before_its_turn(device: torch.device) -> None:
    job = Job(device, True, torch.float32)
    module = job.built(Block)
    first, second = calls_of(job, module, [1, 1, -1, -1, -1.5, -1.5])
    for is_first in (True, False):
        x = job.draw(requires_grad=True)
        losses = [first(x).sum(), second(job.draw(requires_grad=True)).sum()]
        before = [None if p.grad is None else p.grad.clone() for p in module.parameters()]
        for loss in losses:
            loss.backward()
        assert x.grad is not None
        now = [p.grad for p in module.parameters()]
        assert all(g is None for g in now) if is_first else all(map(torch.equal, now, before))  # type: ignore[arg-type]
        first.backward_dw()
        assert all(p.grad is not None for p in module.parameters())
        second.backward_dw()
        del losses, loss
    job.close()


def test_gradients_that_are_kept_do_not_change(device: torch.device) -> None:
    """The first microbatch gives a gradient, the second adds to it; neither lies in memory of the graphs."""

    def script(job: Job) -> None:
        module = job.built(Block)
        order = [1, 1, -1, -1.5, -1, -1.5]
        calls = calls_of(job, module, order, _reuse_graph_input_output_buffers=True)
        for _ in range(3):
            module.zero_grad()
            stepped(job, calls, order)
            job.keep(*(p.grad for p in module.parameters()))

    compared(device, script)


@pytest.mark.parametrize("accumulates", [True, False])
def test_hooks_on_parameters_run_when_the_weight_gradients_come(device: torch.device, accumulates: bool) -> None:
    def script(job: Job) -> None:
        module = job.built(Block)
        seen, after = list[Tensor](), list[Tensor]()
        module.up.weight.register_hook(lambda gradient: gradient * 2)
        module.down.weight.register_hook(seen.append)
        module.up.bias.register_post_accumulate_grad_hook(lambda p: after.append(p.grad.detach().clone()))
        order = [1, 1, -1, -1, -1.5, -1.5]
        calls = calls_of(job, module, order, accumulate_param_grads=accumulates)
        for _ in range(3):
            stepped(job, calls, order)
            assert len(seen) == len(after) == 2
            job.keep(*seen)
            job.note(seen=seen, after=after)
            seen.clear()
            after.clear()

    compared(device, script)


def test_main_grad(device: torch.device) -> None:
    def script(job: Job) -> None:
        module = job.built(Block)
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)

            def moved(p: Any) -> None:
                if p.grad is not None:
                    p.main_grad.add_(p.grad)
                    p.grad = None

            parameter.register_post_accumulate_grad_hook(moved)
        order = [1, 1, -1, -1.5, -1, -1.5]
        calls = calls_of(job, module, order, accumulate_param_grads=True)
        for _ in range(3):
            stepped(job, calls, order)

    compared(device, script)


class Tokens(nn.Module):
    """No argument wants a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(5, HIDDEN), nn.Linear(HIDDEN, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.linear(self.embedding(tokens))
        return result


class Recomputed(nn.Module):
    """What autograd saves of its first layer is computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(checkpoint(lambda x: self.first(x).sin(), x, use_reentrant=False))
        return result


class Weightless(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x.sin(), 0.25)


@pytest.mark.parametrize("accumulates", [True, False])
@pytest.mark.parametrize("kind", [Tokens, Several, InPython, Weightless, Recomputed])
def test_modules_of_any_kind(device: torch.device, kind: type[nn.Module], accumulates: bool) -> None:
    def script(job: Job) -> None:
        def feed() -> tuple[Tensor, ...]:
            if kind is Tokens:
                return (torch.randint(5, (4,), generator=job.data).to(device),)
            return tuple(job.draw(requires_grad=True) for _ in range(2 if kind is Several else 1))

        order = [1, 1, -1, -1.5, 1, -1, -1, -1.5, -1.5]
        sample = tuple(torch.zeros_like(each).requires_grad_(each.requires_grad) for each in feed())
        calls = calls_of(job, job.built(kind), order, *sample, accumulate_param_grads=accumulates)
        for _ in range(3):
            stepped(job, calls, order, feed)

    compared(device, script, replays=9)


def test_a_loss_that_does_not_use_all_results(device: torch.device) -> None:
    """What the loss does not reach has no gradient; the call is computed again, and the report counts it."""

    def script(job: Job) -> None:
        module = job.built(Several)
        calls = calls_of(job, module, [1, -1, -1.5], job.sample(requires_grad=True), job.sample(requires_grad=True))
        for step in range(5):
            module.zero_grad()
            x, y = job.draw(requires_grad=True), job.draw(requires_grad=True)
            first, second, _ = calls[0](x, y)
            (first.sum() if step % 3 == 0 else second.sum() if step % 3 == 1 else first.sum() + second.sum()).backward()
            del first, second, _
            weight_gradients(job, calls[0])
            job.note(inputs=(x, y))
        if job.graphs:
            assert [row.eager_calls[EagerReason.PARTIAL_BACKWARD] for row in job.report.rows] == [4]

    compared(device, script)


# What is computed, and when.


@pytest.mark.parametrize("accumulates", [True, False])
def test_weight_gradients_do_not_repeat_the_work_of_the_backward(device: torch.device, accumulates: bool) -> None:
    """A normalisation runs once for its input and once for its weights; a tape also notes modes of a backward."""
    if device.type == "cuda":
        pytest.skip("the nodes of a GPU's graph are not operations: some run as several kernels")
    counts = []
    for order in ([1, -1], [1, -1, -1.5]):
        job = Job(device, True, torch.float32)
        calls_of(job, job.built(Block), order, accumulate_param_grads=accumulates)
        counts.append(job.rows[0].num_operations)
        job.close()
    assert counts[0] <= counts[1] <= counts[0] + 2


def test_two_chunks_whose_microbatches_cross(device: torch.device) -> None:
    """Backwards between another's backward and its weight gradients, elsewhere in the step than at the capture."""
    order = [1, 2, -2, -2.5, -1, -1.5, 1, 2, 1, 2, -2, -1, -2, -1, -1.5, -2.5, -1.5, -2.5]

    def script(job: Job) -> None:
        rank = Rank(job, order, [[job.built(Block)], [job.built(Block), job.built(Block)]])
        for _ in range(3):
            found = []
            for step in rank.steps:
                if step.phase is Phase.FORWARD:
                    found.append(job.draw(requires_grad=True))
                    rank.forward(step.chunk, step.microbatch, found[-1])
                elif step.phase is Phase.BACKWARD:
                    rank.backward(step.chunk, step.microbatch, job.draw(), None)
                else:
                    rank.weight_gradients(step.chunk, step.microbatch)
            job.note(found=found)

    compared(device, script)
