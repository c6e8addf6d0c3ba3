"""What the entries of an order mean, and which orders are refused."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies.orders import codes

from graphstep.capture.plan import Phase
from graphstep.errors import ConfigError
from graphstep.strategies.order_steps import OrderStep, max_in_flight, steps_of


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
