"""Admission of what a graph can serve."""

from __future__ import annotations

import logging

import pytest
from tests.inference.worlds import World, reference

from graphstep.inference.ladder import Ladder
from graphstep.inference.matching import GraphMatcher
from graphstep.inference.shapes import BatchLimits, BatchShape

LIMITS = BatchLimits(max_requests=4, max_tokens=32, max_sequence_length=100)
DECODE = ((4, 0, 4),)


def world(
    *buckets: tuple[int, int, int], strict: bool = True, chunked: bool = True, limits: BatchLimits = LIMITS
) -> World:
    shapes = tuple(BatchShape(*bucket) for bucket in buckets)
    return World(limits, matcher=GraphMatcher(Ladder(shapes, ()), strict=strict), chunked_prefill=chunked)


def lengths(world: World) -> list[list[int]]:
    return [step.lengths.tolist() for step in world.steps]


def test_without_mixed_graphs_all_is_admitted() -> None:
    some = world(*DECODE)
    some.add([1] * 9, 2)
    some.run()
    assert lengths(some) == [[9], [1]]
    assert some.scheduler.counts.deferrals == 0


def test_a_chunk_is_the_largest_that_reaches_a_bucket() -> None:
    some = world(*DECODE, (16, 1, 3), (8, 1, 3))
    some.add([1], 30)
    some.step()
    request = some.add([2] * 40, 1)
    some.step()
    # Two of the 32 tokens in the budget would serve nobody: the largest bucket has 16, of which one is taken.
    assert lengths(some)[-1] == [1, 15]
    some.run()
    # A chunk that has begun goes on as far as it can, graph or not.
    assert lengths(some)[2:4] == [[1, 25], [1]]
    assert request.output_tokens == reference([2] * 40, 1)


def test_a_prompt_that_fits_a_bucket_with_padding_is_not_split() -> None:
    some = world(*DECODE, (16, 1, 3), (8, 1, 3))
    some.add([1] * 11, 1)
    some.run()
    assert lengths(some) == [[11]]


@pytest.mark.parametrize(("strict", "expected"), [(True, [1, 1, 1]), (False, [1, 1, 1, 5])])
def test_strict_keeps_decode_out_of_places_for_prefill(strict: bool, expected: list[int]) -> None:
    some = world(*DECODE, (8, 1, 0), (8, 2, 0), (8, 4, 0), strict=strict)
    for number in range(3):
        some.add([number] * 2, 9)
    some.step()
    some.add([9] * 5, 1)
    some.step()
    assert lengths(some)[-1] == expected
    assert some.scheduler.counts.deferrals == int(strict)


def test_a_deferred_request_does_not_hold_up_others() -> None:
    some = world(*DECODE, (8, 1, 3), chunked=False)
    some.add([1], 6)
    some.step()
    large, small = some.add([2] * 20, 1), some.add([3] * 4, 1)
    some.step()
    assert lengths(some)[-1] == [1, 4]
    assert (large.num_deferrals, small.num_deferrals) == (1, 0)
    some.run()
    # Nothing fits it, ever: it runs without a graph once nobody else does.
    assert lengths(some)[-1] == [20]
    assert large.output_tokens == reference([2] * 20, 1)


def test_a_request_that_was_passed_often_holds_up_others(caplog: pytest.LogCaptureFixture) -> None:
    some = world(*DECODE, (8, 1, 3), chunked=False)
    some.add([1] * 2, 9)
    some.step()
    large = some.add([2] * 20, 1)
    with caplog.at_level(logging.WARNING):
        for number in range(130):
            some.add([number % 50] * 3, 2)
            some.step()
    assert large.output_tokens == reference([2] * 20, 1)
    assert 100 <= large.num_deferrals < 120
    assert some.scheduler.num_waiting > 0
    assert "100 times a request had to wait" in caplog.text
