"""Pipelines whose ranks all run in one process: the same bits as eager, with buffers as many as are in flight."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from tests.strategies.callables.jobs import DTYPES, Block, Job, compared
from tests.strategies.callables.pipelines import Pipeline, Rank, Small, order_of_rank

from graphstep.capture.plan import Phase
from graphstep.strategies.layer_order import order_of_layers
from graphstep.strategies.order_steps import max_in_flight, steps_of

CHUNKS = [1, 2, 4]


def insist_on_the_depth(rank: Rank) -> None:
    """As many recordings as there are microbatches in flight, for each half of each layer."""
    depth = max_in_flight(rank.steps)
    expected = [2 * depth[chunk] for chunk, layers in enumerate(rank.chunks) for _ in layers]
    assert rank.handle is not None
    assert [row.num_recordings for row in rank.handle.report().rows] == expected


@pytest.fixture(autouse=True)
def frozen_only_for_the_test() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize(
    ("num_stages", "num_chunks"),
    [
        pytest.param(stages, chunks, marks=[pytest.mark.slow] if stages * chunks == 32 else [])
        for stages in (2, 4, 8)
        for chunks in CHUNKS
    ],
)
def test_every_microbatch_of_a_pipeline_is_as_eager(device: torch.device, num_stages: int, num_chunks: int) -> None:
    def script(job: Job) -> None:
        is_large = num_stages * num_chunks > 8
        num_microbatches = num_stages if num_stages * num_chunks > 16 else 2 * num_stages
        pipeline = Pipeline(job, num_stages, num_microbatches, num_chunks, build=Small if is_large else Block)
        pipeline.train(2 if is_large else 5)
        if job.graphs:
            for rank in pipeline.ranks:
                insist_on_the_depth(rank)
            assert job.reasons() == {}

    compared(device, script)


@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("num_microbatches", [2, 6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_of_several_layers(
    device: torch.device, dtype: torch.dtype, num_microbatches: int, num_chunks: int
) -> None:
    def script(job: Job) -> None:
        pipeline = Pipeline(job, 2, num_microbatches, num_chunks, layers=lambda rank, chunk: 1 + (rank + chunk) % 2)
        pipeline.train()
        if job.graphs:
            for rank in pipeline.ranks:
                insist_on_the_depth(rank)
            assert job.reasons() == {}

    compared(device, script, dtype=dtype)


@pytest.mark.parametrize("copies", [True, False])
@pytest.mark.parametrize("reuses", [True, False])
@pytest.mark.parametrize("accumulates", [True, False])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_options_change_no_bit(
    device: torch.device, copies: bool, reuses: bool, accumulates: bool, set_to_none: bool
) -> None:
    """Without copies a rank is given memory of another rank's graphs."""

    def script(job: Job) -> None:
        pipeline = Pipeline(job, 2, 4, 2, copies=copies, reuses=reuses, accumulate_param_grads=accumulates)
        pipeline.train(set_to_none=set_to_none)

    compared(device, script)


def test_without_reuse_every_microbatch_has_graphs(device: torch.device) -> None:
    def script(job: Job) -> None:
        pipeline = Pipeline(job, 2, 4, reuses=False)
        pipeline.train()
        if job.graphs:
            assert [row.num_recordings for row in job.rows] == [2 * 4] * 2

    compared(device, script)


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_recordings_do_not_depend_on_the_number_of_microbatches(device: torch.device, num_chunks: int) -> None:
    job = Job(device, True, torch.float32)
    numbers = []
    for num_microbatches in (16, 64):
        pipeline = Pipeline(job, 4, num_microbatches, num_chunks)
        for rank in pipeline.ranks:
            insist_on_the_depth(rank)
        numbers.append([rank.handle.report().num_recordings for rank in pipeline.ranks if rank.handle])
        job.close()
    assert numbers[0] == numbers[1]
    if num_chunks == 1:
        assert numbers[0] == [2 * 4, 2 * 3, 2 * 2, 2 * 1]


@pytest.mark.parametrize("num_chunks", CHUNKS)
def test_what_is_in_flight_does_not_depend_on_the_number_of_microbatches(num_chunks: int) -> None:
    for rank in range(4):
        depths = [
            max_in_flight(steps_of(order_of_rank(4, rank, num, num_chunks), num_chunks=num_chunks))
            for num in (16, 64, 256)
        ]
        assert depths[0] == depths[1] == depths[2]


def test_many_microbatches_with_few_buffers(device: torch.device) -> None:
    compared(device, lambda job: Pipeline(job, 4, 32, 1).train(2))


@pytest.mark.parametrize("order", [[1, 1, -1, -1], [1, 1, 1, -1, -1, -1], [1, -1, 1, 1, -1, -1], [1] * 4 + [-1] * 4])
def test_one_stage_with_an_order_of_its_own(device: torch.device, order: list[int]) -> None:
    def script(job: Job) -> None:
        pipeline = Pipeline(job, 1, len(order) // 2, orders=[order], layers=lambda *_: 3)
        pipeline.train()
        if job.graphs:
            insist_on_the_depth(pipeline.ranks[0])
            assert job.reasons() == {}

    compared(device, script)


def test_order_in_floats(device: torch.device) -> None:
    compared(device, lambda job: Pipeline(job, 1, 2, orders=[[1.0, 1.0, -1.0, -1.0]]).train())


def test_order_that_has_more_in_flight_later_on(device: torch.device) -> None:
    order = [1, 1, 2, -2, 2, -2, -1, -1, 1, 1, 2, 2, -2, -1, -2, -1]
    compared(device, lambda job: Pipeline(job, 1, 4, 2, orders=[order]).train())


@pytest.mark.parametrize("layers", [[1, 1], [3, 1], [1, 3]])
@pytest.mark.parametrize("num_chunks", [1, 2])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_layers_of_a_backward_between_those_of_the_next_forward(
    device: torch.device, num_stages: int, num_chunks: int, layers: list[int]
) -> None:
    """Each layer has an id of its own; here none depends on another."""
    num_layers = sum(layers[:num_chunks])

    def script(job: Job) -> None:
        order = order_of_layers(order_of_rank(num_stages, 0, 4, num_chunks), layers[:num_chunks])
        rank = Rank(job, order, [[job.built(Small)] for _ in range(num_layers)])
        for _ in range(3):
            found = []
            for step in rank.steps:
                if step.phase is Phase.FORWARD:
                    x = job.draw(requires_grad=True)
                    loss = rank.forward(step.chunk, step.microbatch, x).square().sum()
                    found += [x, loss.detach().clone()]
                    del loss
                else:
                    rank.backward(step.chunk, step.microbatch, job.draw(), None)
            job.note(found=found)
        if job.graphs:
            insist_on_the_depth(rank)
            assert job.reasons() == {}

    compared(device, script)
