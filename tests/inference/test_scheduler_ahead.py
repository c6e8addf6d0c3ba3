"""Steps that are scheduled while the tokens of the one before are being drawn."""

from __future__ import annotations

from typing import Any

import pytest
from tests.inference.worlds import World, reference

from graphstep.errors import LifecycleError
from graphstep.inference.requests import NOT_FINITE, FinishReason, RequestState
from graphstep.inference.shapes import BatchLimits


def world(max_requests: int = 4, max_tokens: int = 16, **others: Any) -> World:
    limits = BatchLimits(max_requests=max_requests, max_tokens=max_tokens, max_sequence_length=64)
    return World(limits, looks_ahead=True, **others)


def shapes(world: World) -> list[tuple[int, int, int]]:
    return [(s.shape.tokens, s.shape.prefill, s.shape.decode) for s in world.steps]


def test_tokens_go_from_step_to_step() -> None:
    one = world()
    request = one.add([1, 2, 3, 4, 5], 4)
    one.run()
    assert shapes(one) == [(5, 1, 0), (1, 0, 1), (1, 0, 1), (1, 0, 1)], "no step too many: the end was known"
    assert [step.feeds.tolist() for step in one.steps] == [[], [0], [0], [0]]
    assert request.output_tokens == reference([1, 2, 3, 4, 5], 4)


def test_a_stop_token_is_found_a_step_late_and_nothing_more_is_given() -> None:
    some = world()
    expected = reference([1, 2, 3], 20)
    stop = expected[4]
    length = expected.index(stop) + 1
    request = some.add([1, 2, 3], 20, stop=(stop,))
    other = some.add([4], 20)
    outputs = []
    while not request.is_finished:
        outputs += [output for output in some.step() if output.request is request]
    assert [output.token for output in outputs] == expected[:length]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert request in some.launched[0][0].requests
    some.check_blocks()
    some.run()
    assert request.output_tokens == expected[:length]
    assert other.output_tokens == reference([4], 20)
    assert some.pool.num_available == some.pool.capacity


def test_rows_are_those_of_the_step_before() -> None:
    some = world()
    first, second, third = (some.add([number], 9) for number in (1, 2, 3))
    some.launch()
    some.scheduler.end(first)
    some.launch()
    assert some.steps[-1].requests == [second, third]
    assert some.steps[-1].feeds.tolist() == [1, 2]
    some.read()
    some.launch()
    assert some.steps[-1].feeds.tolist() == [0, 1]
    some.run()
    assert second.output_tokens == reference([2], 9)


def test_prompts_join_while_tokens_are_drawn() -> None:
    some = world(max_tokens=6)
    first = some.add([1, 2, 3], 8)
    some.launch()
    late = some.add([5] * 8, 3)
    some.launch()
    assert shapes(some)[-1] == (6, 1, 1)
    some.read()
    some.launch()
    assert (some.steps[-1].feeds.tolist(), some.steps[-1].draws) == ([0], [True, True])
    some.read()
    some.launch()
    assert some.steps[-1].feeds.tolist() == [0, 1]
    some.run()
    assert first.output_tokens == reference([1, 2, 3], 8)
    assert late.output_tokens == reference([5] * 8, 3)


def test_nobody_gives_way_while_in_flight() -> None:
    some = world(num_blocks=7, prefix_caching=False)
    first, second = some.add([1] * 7, 12), some.add([2] * 7, 12)
    has_waited = False
    while some.scheduler.has_work:
        if not some.launched:
            assert some.launch()
        if not some.launch() and some.scheduler.num_running == 2 and not second.num_preemptions:
            has_waited = True
            assert second.state is RequestState.RUNNING
        some.read()
    assert has_waited
    assert second.num_preemptions == 1
    assert first.output_tokens == reference([1] * 7, 12)
    assert second.output_tokens == reference([2] * 7, 12)


def test_one_that_ends_in_flight_gets_nothing_more() -> None:
    some = world()
    request, other = some.add([1] * 5, 9), some.add([2] * 5, 9)
    some.launch()
    some.launch()
    some.scheduler.end(request)
    some.check_blocks()
    joined = some.add([3] * 5, 9)
    assert [output.request for output in some.read()] == [other]
    some.launch()
    assert joined in some.steps[-1].requests
    some.run()
    assert request.output_tokens == []
    assert other.output_tokens == reference([2] * 5, 9)
    assert joined.output_tokens == reference([3] * 5, 9)


def test_steps_are_taken_back_latest_first() -> None:
    some = world(max_tokens=4)
    request, long = some.add([1, 2], 9), some.add([3] * 7, 9)
    some.launch()
    some.launch()
    (first, _), (second, _) = some.launched
    with pytest.raises(LifecycleError, match="not the one in flight"):
        some.scheduler.abandon(first)
    with pytest.raises(LifecycleError, match="not the one in flight"):
        some.scheduler.commit(second, [1, 2])
    with pytest.raises(LifecycleError, match="neither been committed nor abandoned"):
        some.scheduler.schedule()
    some.discard()
    assert (request.is_prefilling, long.is_prefilling) == (True, True)
    assert (request.num_computed, long.num_computed) == (0, 0)
    some.run()
    assert shapes(some) == shapes(some)[:2] * 2 + shapes(some)[4:]
    assert request.output_tokens == reference([1, 2], 9)
    assert long.output_tokens == reference([3] * 7, 9)


def test_logits_that_are_not_finite_end_a_request_and_its_next_token_is_thrown_away() -> None:
    some = world()
    request, other = some.add([1] * 5, 9), some.add([2] * 5, 2)
    some.launch()
    some.launch()
    (first, drawn), (second, then) = some.launched
    outputs = some.scheduler.commit(first, [NOT_FINITE, drawn[1]])
    assert [output.finish_reason for output in outputs] == [FinishReason.ERROR, None]
    outputs = some.scheduler.commit(second, then)
    assert [output.request for output in outputs] == [other]
    assert request.output_tokens == []
    assert not some.scheduler.has_work


def test_what_is_full_can_be_found_once_it_is_committed() -> None:
    some = world()
    first = some.add([1, 2, 3], 12)
    for _ in range(5):
        some.step()
    again = some.add(first.tokens.tolist(), 1)
    some.step()
    some.step()
    assert again.num_cached_tokens == 4
    some.run()
    assert again.output_tokens == reference(again.tokens[:-1].tolist(), 1)
