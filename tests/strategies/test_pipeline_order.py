"""In which order the forwards and backwards of a pipeline rank run, and which orders are refused."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from graphstep.errors import ConfigError
from graphstep.strategies.pipeline_order import (
    OrderStep,
    Phase,
    expanded,
    max_in_flight,
    num_warmup_forwards,
    order_of,
    pipeline_order,
    schedule_table,
    steps_of,
)


class Pipeline(NamedTuple):
    """Sizes that `pipeline_order` accepts."""

    size: int
    num_chunks: int
    group_size: int
    num_microbatches: int

    def order(self, rank: int, num_microbatches: int | None = None) -> tuple[int, ...]:
        return pipeline_order(
            num_microbatches or self.num_microbatches,
            pipeline_size=self.size,
            pipeline_rank=rank,
            num_model_chunks=self.num_chunks,
            microbatch_group_size=self.group_size,
        )

    def steps(self, rank: int, num_microbatches: int | None = None) -> tuple[OrderStep, ...]:
        return steps_of(self.order(rank, num_microbatches), num_chunks=self.num_chunks)


@st.composite
def pipelines(draw: st.DrawFn) -> Pipeline:
    size = draw(st.sampled_from([1, 2, 4, 8]))
    num_chunks = draw(st.sampled_from([1, 2, 4]))
    group_size = draw(st.integers(size, 2 * size + 1))
    num_left = draw(st.sampled_from([0, *range(size, group_size)]))
    num_groups = draw(st.integers(0 if num_left else 1, 4))
    return Pipeline(size, num_chunks, group_size, num_groups * group_size + num_left)


def codes(call: Callable[..., object], *args: Any, **kwargs: Any) -> list[str]:
    """The codes of what is refused, in order."""
    with pytest.raises(ConfigError) as caught:
        call(*args, **kwargs)
    return [problem.code for problem in caught.value.problems]


def entries(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split())


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


# Reading an order.


def test_steps_count_chunks_and_microbatches_from_zero_and_phases_apart() -> None:
    assert steps_of([1, 2, 1, -2, -1, 2, -2, -1.0], num_chunks=2) == (
        OrderStep(0, 0, Phase.FORWARD),
        OrderStep(1, 0, Phase.FORWARD),
        OrderStep(0, 1, Phase.FORWARD),
        OrderStep(1, 0, Phase.BACKWARD),
        OrderStep(0, 0, Phase.BACKWARD),
        OrderStep(1, 1, Phase.FORWARD),
        OrderStep(1, 1, Phase.BACKWARD),
        OrderStep(0, 1, Phase.BACKWARD),
    )


def test_an_entry_half_below_a_backward_is_its_weight_gradients() -> None:
    steps = steps_of([1, 2, -2, -2.5, -1, -1.5], num_chunks=2)
    assert steps[3] == OrderStep(1, 0, Phase.WEIGHT_GRADIENT)
    assert steps[5] == OrderStep(0, 0, Phase.WEIGHT_GRADIENT)


def test_steps_read_as_words() -> None:
    texts = [str(OrderStep(1, 3, phase)) for phase in Phase]
    assert texts == [
        "forward of chunk 1, microbatch 3",
        "backward of chunk 1, microbatch 3",
        "weight gradients of chunk 1, microbatch 3",
    ]


def test_a_microbatch_is_in_flight_until_its_weight_gradients_where_it_has_them() -> None:
    together = steps_of([1, -1, 1, -1], num_chunks=1)
    apart = steps_of([1, -1, 1, -1.5, -1, -1.5], num_chunks=1)
    assert (max_in_flight(together), max_in_flight(apart)) == ({0: 1}, {0: 2})


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ([], ["order-empty"]),
        ([1, -1, 2, -2, 0], ["order-zero"]),
        ([1, -1, 2, -2, -0.5], ["order-zero"]),
        ([1, -1, 2, -2, True], ["order-entry"]),
        ([1, -1, 2, -2, 1.5], ["order-entry"]),
        ([1, -1, 2, -2, -1.25], ["order-entry"]),
        ([1, -1, 2, -2, float("nan")], ["order-entry"]),
        ([1, -1, 2, -2, float("-inf")], ["order-entry"]),
        ([1, -1, 2, -2, "1"], ["order-entry"]),
        ([1, -1, 2, -2, None], ["order-entry"]),
        ([1, -1, 2, -2, 3, -3, -3.5, 10**400], ["order-unknown-chunk"] * 4),
        ([1, -1, -1, 2, -2], ["order-unbalanced"]),
        ([1, 1, -1, 2, 2, -2], ["order-unbalanced", "order-unbalanced"]),
        ([1, -1, -1.5, 2, -2], ["order-unbalanced"]),
        ([1, -1, 2, -2, 1, -1], ["order-not-whole-microbatches"]),
        ([1, -1], ["order-not-whole-microbatches"]),
        ([-1, 1, 2, -2], ["order-backward-before-forward"]),
        ([1, -1.5, -1, 2, -2, -2.5], ["order-weight-gradient-early"]),
        ([-1.5, -1, 1, 2, -2, -2.5], ["order-backward-before-forward", "order-weight-gradient-early"]),
    ],
    ids=lambda value: str(value) if len(str(value)) < 40 else "huge",
)
def test_orders_that_cannot_run_are_refused_with_a_code(order: list[Any], expected: list[str]) -> None:
    assert codes(steps_of, order, num_chunks=2) == expected


def test_all_problems_of_an_order_are_told_at_once_each_with_its_position() -> None:
    with pytest.raises(ConfigError) as caught:
        steps_of([1, 0, -2, 2, 9, -1, 1.25, -2.5], num_chunks=2, names="order of stage 3")
    found = [(problem.code, problem.where) for problem in caught.value.problems]
    assert found == [
        ("order-zero", "order of stage 3[1]"),
        ("order-unknown-chunk", "order of stage 3[4]"),
        ("order-entry", "order of stage 3[6]"),
        ("order-unbalanced", "order of stage 3"),
        ("order-backward-before-forward", "order of stage 3[2]"),
    ]
    assert all(problem.fix for problem in caught.value.problems)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_message_says_what_was_expected_what_was_found_where_and_what_to_do() -> None:
    with pytest.raises(ConfigError) as caught:
        steps_of([1, -1, -1, 1, 1, -1], num_chunks=1)
    assert str(caught.value) == (
        "backward of chunk 0, microbatch 1 comes after its forward at position 3, got it at position 2\n"
        "  where: _order[2]\n"
        "  fix:   move the forward ahead, or the backward back"
    )


def test_counts_name_each_kind_and_chunk() -> None:
    with pytest.raises(ConfigError) as caught:
        steps_of([1, 1, -1, -1, -1.5, 2, -2], num_chunks=2)
    texts = [problem.what for problem in caught.value.problems]
    assert [text.partition(", got ")[2] for text in texts] == [
        "for chunk 0 forward: 2, backward: 2, weight gradients: 1",
        "for chunk 1 forward: 1, backward: 1, weight gradients: 0",
        "numbers of forwards chunk 0: 2, chunk 1: 1",
    ]


@given(st.lists(st.sampled_from([-2.5, -2, -1.5, -1, 1, 2]), min_size=1, max_size=8))
def test_what_is_read_gives_the_same_entries_again_and_all_else_is_refused(order: list[float]) -> None:
    signs = {Phase.FORWARD: (1, 0), Phase.BACKWARD: (-1, 0), Phase.WEIGHT_GRADIENT: (-1, -0.5)}
    counts = Counter(order)
    nums = {counts[1], counts[2], counts[-1], counts[-2]}
    weights = {counts[-1.5], counts[-2.5]}

    def is_behind(later: float, earlier: float) -> bool:
        pairs = ((position, order[: position + 1]) for position, entry in enumerate(order) if entry in (later, earlier))
        return all(entries.count(later) <= entries.count(earlier) for _, entries in pairs)

    is_valid = (
        len(nums) == 1
        and weights in ({0}, nums)
        and all(is_behind(-chunk, chunk) and is_behind(-chunk - 0.5, -chunk) for chunk in (1, 2))
    )
    try:
        steps = steps_of(order, num_chunks=2)
    except ConfigError:
        assert not is_valid
    else:
        assert is_valid
        again = [signs[step.phase][0] * (step.chunk + 1) + signs[step.phase][1] for step in steps]
        assert again == order


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


# One id for each layer.


def test_layers_of_a_backward_lie_between_those_of_the_next_forward() -> None:
    assert expanded(pipeline_order(2), [3]) == entries("1 2 3  1 -3 2 -2 3 -1  -3 -2 -1")


def test_weight_gradients_are_a_layer_behind_in_a_pair_and_next_to_their_backward_alone() -> None:
    expected = entries("1 2 3  1 -3 2 -2 -3.5 3 -1 -2.5 -1.5  -3 -3.5 -2 -2.5 -1 -1.5")
    assert expanded(pipeline_order(2), [3], delays_weight_gradients=True) == expected


def test_what_one_of_a_pair_has_more_of_follows() -> None:
    order = pipeline_order(2, num_model_chunks=2)
    assert order == (1, 2, -2, 1, -1, 2, -2, -1)
    assert expanded(order, [1, 3]) == entries("1  2 3 4  1 -4 -3 -2  2 -1 3 4  -4 -3 -2  -1")
    delayed = entries("1  2 3 4  1 -4 -3 -4.5 -2 -3.5 -2.5  2 -1 3 4 -1.5  -4 -4.5 -3 -3.5 -2 -2.5  -1 -1.5")
    assert expanded(order, [1, 3], delays_weight_gradients=True) == delayed


def test_a_chunk_without_layers_has_no_entries() -> None:
    assert expanded(pipeline_order(2, num_model_chunks=2), [0, 1]) == entries("1 -1 1 -1")


def test_first_layers_of_an_overlapped_order_have_one_more_microbatch_in_flight() -> None:
    order = pipeline_order(8, pipeline_size=4, pipeline_rank=1)
    layers = steps_of(expanded(order, [2]), num_chunks=2)
    assert max_in_flight(steps_of(order, num_chunks=1)) == {0: 3}
    assert max_in_flight(layers) == {0: 4, 1: 3}


@given(pipelines(), st.lists(st.integers(0, 4), min_size=4, max_size=4), st.booleans())
def test_layers_run_once_for_each_microbatch_in_an_order_that_can_run(
    pipeline: Pipeline, num_layers: list[int], is_delayed: bool
) -> None:
    layers_per_chunk = [1 + num_layers[0], *num_layers[1 : pipeline.num_chunks]]
    for rank in {0, pipeline.size // 2, pipeline.size - 1}:
        order = expanded(pipeline.order(rank), layers_per_chunk, delays_weight_gradients=is_delayed)
        steps = steps_of(order, num_chunks=sum(layers_per_chunk))
        assert len(set(steps)) == len(steps)
        num_phases = 3 if is_delayed else 2
        assert len(steps) == num_phases * sum(layers_per_chunk) * pipeline.num_microbatches
        place = {step: index for index, step in enumerate(steps)}
        first = 0
        for num in layers_per_chunk:
            for layer in range(first, first + num - 1):
                for microbatch in range(pipeline.num_microbatches):
                    here, above = (
                        {phase: place.get(OrderStep(each, microbatch, phase)) for phase in Phase}
                        for each in (layer, layer + 1)
                    )
                    assert here[Phase.FORWARD] < above[Phase.FORWARD] < above[Phase.BACKWARD] < here[Phase.BACKWARD]
            first += num


def test_layers_that_are_no_numbers_and_orders_with_weight_gradients_are_refused() -> None:
    assert codes(expanded, [1, -1], [-1]) == ["pipeline-size"]
    assert codes(expanded, [1, -1], [0]) == codes(expanded, [1, -1], []) == ["order-no-layers"]
    assert codes(expanded, [1, -1, -1.5], [2]) == ["order-weight-gradients-twice"]
    assert codes(expanded, [1, 2, -1], [2, True]) == ["pipeline-size", "order-unbalanced"]
