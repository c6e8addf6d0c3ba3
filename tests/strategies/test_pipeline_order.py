"""In which order the forwards and backwards of a pipeline rank run, and which sizes are refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from tests.strategies.orders import Pipeline, codes, entries, pipelines

from graphstep.capture.plan import Phase
from graphstep.errors import ConfigError
from graphstep.strategies.order_steps import OrderStep, max_in_flight, steps_of
from graphstep.strategies.pipeline_order import num_warmup_forwards, order_of, pipeline_order, schedule_table

# The table, the number of warmup forwards, and the order.


def test_table_takes_a_group_through_all_chunks_and_lets_the_last_group_be_shorter() -> None:
    assert schedule_table(3, 2, 2) == ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (2, 1))


def test_table_of_one_chunk_does_not_depend_on_the_groups() -> None:
    assert schedule_table(5, 1, 2) == schedule_table(5, 1, 9) == tuple((microbatch, 0) for microbatch in range(5))


@pytest.mark.parametrize(
    ("arguments", "num_warmup"),
    [
        ((1, 0, 8), 0),
        ((4, 0, 8), 3),
        ((4, 2, 8), 1),
        ((4, 3, 8), 0),
        ((4, 0, 2), 2),
        ((2, 0, 5, 2, 3), 5),
        ((4, 0, 8, 2), 10),
        ((4, 3, 8, 2), 4),
        ((4, 0, 4, 4), 16),
        ((1, 0, 8, 3), 2),
        ((1, 0, 8, 3, 4), 8),
    ],
)
def test_warmup_forwards_fill_the_way_to_the_last_stage_and_never_exceed_all(
    arguments: tuple[int, ...], num_warmup: int
) -> None:
    assert num_warmup_forwards(*arguments) == num_warmup


def test_order_of_two_chunks_and_a_shorter_last_group_is_the_published_example() -> None:
    expected = entries("1 1 1 2 2 2 -2 1 -2 1 -2 2 -1 2 -1 -1 -2 -2 -1 -1")
    assert order_of(schedule_table(5, 2, 3), 5, 2) == expected
    assert pipeline_order(5, pipeline_size=2, num_model_chunks=2, microbatch_group_size=3) == expected


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, "1 1 1 1 -1 1 -1 1 -1 -1 -1 -1"),
        (1, "1 1 1 -1 1 -1 1 -1 1 -1 -1 -1"),
        (3, "1 -1 1 -1 1 -1 1 -1 1 -1 1 -1"),
    ],
)
def test_without_interleaving_each_stage_has_one_warmup_forward_less_than_the_one_before(
    rank: int, expected: str
) -> None:
    assert pipeline_order(6, pipeline_size=4, pipeline_rank=rank) == entries(expected)


def test_without_a_pipeline_forward_and_backward_take_turns() -> None:
    assert pipeline_order(3) == (1, -1, 1, -1, 1, -1)


def test_chunks_of_a_single_stage_run_forward_before_the_last_of_them_runs_backward() -> None:
    assert pipeline_order(2, num_model_chunks=2) == (1, 2, -2, 1, -1, 2, -2, -1)


def test_groups_are_as_large_as_the_pipeline_unless_said() -> None:
    sizes = {"pipeline_size": 4, "pipeline_rank": 1, "num_model_chunks": 2}
    assert pipeline_order(8, **sizes) == pipeline_order(8, **sizes, microbatch_group_size=4)
    assert pipeline_order(8, **sizes) != pipeline_order(8, **sizes, microbatch_group_size=8)


@given(pipelines())
def test_every_forward_runs_once_and_its_backward_once_after_it(pipeline: Pipeline) -> None:
    for rank in range(pipeline.size):
        steps = pipeline.steps(rank)
        expected = {(c, m) for c in range(pipeline.num_chunks) for m in range(pipeline.num_microbatches)}
        place = {step: index for index, step in enumerate(steps)}
        assert len(place) == len(steps) == 2 * len(expected)
        for chunk, microbatch in expected:
            forward = place[OrderStep(chunk, microbatch, Phase.FORWARD)]
            assert forward < place[OrderStep(chunk, microbatch, Phase.BACKWARD)]


@given(pipelines())
def test_kth_entry_of_a_chunk_is_its_kth_microbatch_in_the_table(pipeline: Pipeline) -> None:
    table = schedule_table(pipeline.num_microbatches, pipeline.num_chunks, pipeline.group_size)
    mirrored = tuple((microbatch, pipeline.num_chunks - 1 - chunk) for microbatch, chunk in table)
    for rank in range(pipeline.size):
        steps = pipeline.steps(rank)
        for phase, rows in ((Phase.FORWARD, table), (Phase.BACKWARD, mirrored)):
            assert tuple((step.microbatch, step.chunk) for step in steps if step.phase is phase) == rows


@given(pipelines())
def test_microbatches_in_flight_depend_on_their_number_only_while_there_are_few(pipeline: Pipeline) -> None:
    # All forwards of the warmup, and one, fit into so many groups; what follows repeats group by group.
    num_enough = pipeline.group_size * (2 * pipeline.num_chunks + 2)
    num_left = pipeline.num_microbatches % pipeline.group_size
    for rank in range(pipeline.size):
        enough, many = (
            max_in_flight(pipeline.steps(rank, num + num_left))
            for num in (num_enough, num_enough + 3 * pipeline.group_size)
        )
        assert enough == many


@pytest.mark.parametrize("rank", range(4))
def test_without_interleaving_a_stage_has_itself_and_all_later_stages_in_flight(rank: int) -> None:
    for num_microbatches in (1, 2, 3, 4, 5, 64):
        order = pipeline_order(num_microbatches, pipeline_size=4, pipeline_rank=rank)
        assert max_in_flight(steps_of(order, num_chunks=1)) == {0: min(4 - rank, num_microbatches)}


# All ranks together.


class Computation(NamedTuple):
    """Of one microbatch in one virtual stage: chunk by chunk, and within a chunk rank by rank."""

    phase: Phase
    stage: int
    microbatch: int


def run_ranks(ranks: Sequence[Sequence[Sequence[Computation]]], num_stages: int) -> list[int]:
    """Each rank runs its units in order; a unit waits for all that it needs from other stages.

    Returns:
        How many units each rank has left when none can go on.
    """
    position = [0] * len(ranks)
    done: set[Computation] = set()
    is_moving = True
    while is_moving:
        is_moving = False
        for rank, units in enumerate(ranks):
            while position[rank] < len(units):
                unit = units[position[rank]]
                if not all(is_ready(computation, done, num_stages) for computation in unit):
                    break
                done.update(unit)
                position[rank] += 1
                is_moving = True
    return [len(units) - reached for units, reached in zip(ranks, position, strict=True)]


def is_ready(computation: Computation, done: set[Computation], num_stages: int) -> bool:
    phase, stage, microbatch = computation
    sender = stage - 1 if phase is Phase.FORWARD else stage + 1
    return not 0 <= sender < num_stages or Computation(phase, sender, microbatch) in done


def computations(steps: Sequence[OrderStep], pipeline: Pipeline, rank: int) -> list[Computation]:
    """The stage of a chunk: the stages of a rank lie one pipeline apart."""
    return [Computation(step.phase, step.chunk * pipeline.size + rank, step.microbatch) for step in steps]


def with_pairs(computations: Sequence[Computation]) -> list[list[Computation]]:
    """A backward and the forward behind it together: one waits for what either needs."""
    units: list[list[Computation]] = []
    for computation in computations:
        if computation.phase is Phase.FORWARD and units and units[-1][-1].phase is Phase.BACKWARD:
            units[-1].append(computation)
        else:
            units.append([computation])
    return units


@example(Pipeline(size=2, num_chunks=2, group_size=3, num_microbatches=5))
@example(Pipeline(size=8, num_chunks=4, group_size=8, num_microbatches=5))
@given(pipelines())
def test_ranks_never_wait_for_each_other_forever(pipeline: Pipeline) -> None:
    ranks = [computations(pipeline.steps(rank), pipeline, rank) for rank in range(pipeline.size)]
    units = [[[computation] for computation in rank] for rank in ranks]
    num_stages = pipeline.size * pipeline.num_chunks
    assert run_ranks(units, num_stages) == [0] * pipeline.size


@given(pipelines())
def test_ranks_never_wait_forever_when_a_backward_overlaps_the_next_forward(pipeline: Pipeline) -> None:
    units = [with_pairs(computations(pipeline.steps(rank), pipeline, rank)) for rank in range(pipeline.size)]
    assert run_ranks(units, pipeline.size * pipeline.num_chunks) == [0] * pipeline.size


def test_simulated_ranks_do_wait_forever_for_a_shorter_last_group_that_is_refused() -> None:
    pipeline = Pipeline(size=4, num_chunks=4, group_size=4, num_microbatches=5)
    ranks = []
    for rank in range(4):
        num_warmup = num_warmup_forwards(4, rank, 8, 4)
        steps = steps_of(order_of(schedule_table(5, 4, 4), min(num_warmup, 20), 4), num_chunks=4)
        ranks.append([[computation] for computation in computations(steps, pipeline, rank)])
    assert all(run_ranks(ranks, num_stages=16))
    assert codes(pipeline.order, 0) == ["pipeline-microbatches"]


# What is refused before there is an order.


@pytest.mark.parametrize("size", [0, -1, True, 1.0, "2"])
def test_sizes_are_whole_numbers_of_at_least_one(size: Any) -> None:
    assert codes(schedule_table, size, size, size) == ["pipeline-size"] * 3
    assert codes(steps_of, [1, -1], num_chunks=size) == ["pipeline-size"]
    assert codes(pipeline_order, size) == ["pipeline-size"]
    assert codes(pipeline_order, 4, microbatch_group_size=size) == ["pipeline-size"]


def test_all_bad_sizes_are_told_at_once_and_a_default_is_not_blamed() -> None:
    with pytest.raises(ConfigError) as caught:
        pipeline_order(0, pipeline_size=0, pipeline_rank=-1, num_model_chunks=0)
    assert [problem.where for problem in caught.value.problems] == [
        "argument pipeline_size",
        "argument num_microbatches",
        "argument num_model_chunks",
        "argument pipeline_rank",
    ]


@pytest.mark.parametrize("rank", [-1, 2, True, 0.0])
def test_a_rank_outside_the_pipeline_is_refused(rank: Any) -> None:
    assert codes(pipeline_order, 4, pipeline_size=2, pipeline_rank=rank) == ["pipeline-rank"]


def test_chunks_need_groups_as_large_as_the_pipeline() -> None:
    sizes = {"pipeline_size": 4, "microbatch_group_size": 2}
    assert codes(pipeline_order, 8, num_model_chunks=2, **sizes) == ["pipeline-group-size"]
    assert pipeline_order(8, **sizes) == pipeline_order(8, pipeline_size=4)


def test_chunks_need_a_last_group_as_large_as_the_pipeline_and_the_fix_is_accepted() -> None:
    with pytest.raises(ConfigError, match=r"got 1 of 13") as caught:
        pipeline_order(13, pipeline_size=4, num_model_chunks=2, microbatch_group_size=6)
    assert caught.value.problems[0].fix == "use 12 or 16 microbatches"
    for num_microbatches in (12, 16, 3):
        assert pipeline_order(num_microbatches, pipeline_size=4, num_model_chunks=2, microbatch_group_size=6)
    assert pipeline_order(13, pipeline_size=4)


@pytest.mark.parametrize("num_warmup", [-1, 5, True, 1.0])
def test_more_warmup_forwards_than_forwards_are_refused(num_warmup: Any) -> None:
    assert codes(order_of, schedule_table(4, 1, 1), num_warmup, 1) == ["pipeline-warmup"]


def test_too_few_warmup_forwards_are_refused_with_the_backward_that_comes_too_soon() -> None:
    with pytest.raises(ConfigError) as caught:
        order_of(schedule_table(2, 2, 2), 0, 2)
    first = caught.value.problems[0]
    assert (first.code, first.where) == ("order-backward-before-forward", "order_of(num_warmup=0)[1]")


def test_a_table_of_other_chunks_is_refused() -> None:
    assert codes(order_of, [(0, 0), (0, 2), (0, -1), (0, True)], 0, 2) == ["pipeline-table"] * 3
    assert codes(order_of, [(0, 0), (1, 0), (0, 1)], 3, 2) == [
        "order-unbalanced",
        "order-unbalanced",
        "order-not-whole-microbatches",
    ]
    assert codes(order_of, [], 0, 1) == ["order-empty"]
