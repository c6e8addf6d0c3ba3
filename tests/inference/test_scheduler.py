from __future__ import annotations

from typing import Any

import pytest
from tests.inference.worlds import World, reference

from graphstep.errors import ConfigError, LifecycleError, RequestError
from graphstep.inference.blocks import BlockPool
from graphstep.inference.requests import NOT_FINITE, FinishReason, RequestState, SamplingParams
from graphstep.inference.scheduler import Scheduler
from graphstep.inference.shapes import BatchLimits, BatchShape


def world(max_requests: int = 4, max_tokens: int = 16, max_sequence_length: int = 64, **others: Any) -> World:
    return World(
        BatchLimits(max_requests=max_requests, max_tokens=max_tokens, max_sequence_length=max_sequence_length),
        **others,
    )


def shapes(world: World) -> list[tuple[int, int, int]]:
    return [(s.shape.tokens, s.shape.prefill, s.shape.decode) for s in world.steps]


def test_one_request() -> None:
    one = world()
    request = one.add([1, 2, 3, 4, 5], 3)
    assert request.state is RequestState.WAITING
    one.run()
    assert shapes(one) == [(5, 1, 0), (1, 0, 1), (1, 0, 1)]
    assert request.output_tokens == reference([1, 2, 3, 4, 5], 3)
    assert request.finish_reason is FinishReason.LENGTH
    assert one.scheduler.schedule() is None


def test_requests_join_a_running_batch() -> None:
    some = world()
    first = some.add([1, 2, 3], 4)
    some.step()
    second = some.add([4, 5], 2)
    some.run()
    assert shapes(some) == [(3, 1, 0), (3, 1, 1), (2, 0, 2), (1, 0, 1)]
    assert first.output_tokens == reference([1, 2, 3], 4)
    assert second.output_tokens == reference([4, 5], 2)


def test_long_prompts_are_split_and_decode_goes_first() -> None:
    some = world(max_tokens=8)
    some.add([1], 8)
    some.step()
    long = some.add(list(range(20)), 1)
    some.add([7, 7], 1)
    some.run()
    assert shapes(some)[:5] == [(1, 1, 0), (8, 1, 1), (8, 1, 1), (8, 2, 1), (2, 1, 1)]
    assert [step.lengths.tolist() for step in some.steps[1:5]] == [[1, 7], [1, 7], [1, 6, 1], [1, 1]]
    assert [step.draws for step in some.steps[1:5]] == [[True, False], [True, False], [True, True, False], [True, True]]
    assert long.output_tokens == reference(list(range(20)), 1)


def test_unsplit_prompts_wait_for_a_step_with_room() -> None:
    some = world(max_tokens=8, chunked_prefill=False)
    some.add([1] * 5, 1)
    some.add([2] * 5, 1)
    some.run()
    assert shapes(some) == [(5, 1, 0), (5, 1, 0)]


def test_stop_tokens_end_a_request_with_them() -> None:
    one = world()
    expected = reference([1, 2, 3], 20)
    stop = expected[4]
    request = one.add([1, 2, 3], 20, stop=(stop,))
    one.run()
    assert request.output_tokens == expected[: expected.index(stop) + 1]
    assert request.finish_reason is FinishReason.STOP


def test_the_longest_sequence_ends_a_request() -> None:
    one = world(max_sequence_length=8)
    request = one.add([1, 2, 3], 100)
    one.run()
    assert len(request.output_tokens) == 5
    assert request.finish_reason is FinishReason.LENGTH


def test_the_latest_gives_way_when_blocks_run_out() -> None:
    some = world(num_blocks=7, prefix_caching=False)
    first, second = some.add([1] * 7, 12), some.add([2] * 7, 12)
    some.run()
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert [step.preempted for step in some.steps if step.preempted] == [[second]]
    assert first.output_tokens == reference([1] * 7, 12)
    assert second.output_tokens == reference([2] * 7, 12)
    assert some.scheduler.counts.preemptions == 1


def test_a_preempted_request_goes_before_later_ones() -> None:
    some = world(max_requests=2, num_blocks=7, prefix_caching=False)
    first, second, third = (some.add([n] * 7, 12) for n in (1, 2, 3))
    ended = []
    while some.scheduler.has_work:
        ended += [output.request for output in some.step() if output.finish_reason]
    assert second.num_preemptions > 0
    assert ended == [first, second, third]


def test_what_is_computed_again_may_be_split_without_chunked_prefill() -> None:
    some = world(max_tokens=8, num_blocks=7, prefix_caching=False, chunked_prefill=False)
    first, second = some.add([1] * 7, 12), some.add([2] * 7, 12)
    some.run()
    assert second.num_preemptions == 1
    assert len(second.tokens) > 8
    assert first.output_tokens == reference([1] * 7, 12)
    assert second.output_tokens == reference([2] * 7, 12)


def test_known_prefixes_are_not_computed_again() -> None:
    some = world()
    some.add([1, 2, 3, 4, 5, 6, 7, 8, 9], 1)
    some.step()
    request = some.add([1, 2, 3, 4, 5, 6, 7, 8], 1)
    other = some.add([1, 2, 3, 4, 9, 9, 9, 9, 9], 1)
    some.step()
    assert some.steps[-1].starts.tolist() == [4, 4]  # of eight known tokens, the last is computed for its logits
    assert request.num_cached_tokens == other.num_cached_tokens == 4
    assert some.scheduler.counts.cached_tokens == 8


def test_what_was_generated_is_a_prefix_too() -> None:
    some = world()
    first = some.add([1, 2, 3], 10)
    some.run()
    again = some.add([*first.tokens, 5], 1)
    some.run()
    assert again.num_cached_tokens == 12


def test_forgotten_prefixes_are_computed_again() -> None:
    some = world()
    some.add([1, 2, 3, 4, 5], 1)
    some.run()
    # Its first block is not full yet when all is forgotten, and then fills up beside what is older.
    running = some.add([1, 2], 12)
    some.step()
    some.scheduler.forget_cache()
    some.run()
    assert running.output_tokens == reference([1, 2], 12)
    again = [some.add([1, 2, 3, 4, 5], 1), some.add([*running.tokens], 1)]
    some.run()
    assert [request.num_cached_tokens for request in again] == [0, 0]


def test_those_that_run_keep_a_block_to_grow_into() -> None:
    some = world(max_requests=2, num_blocks=6, prefix_caching=False)
    some.add([1] * 5, 6)
    some.step()
    waiting = some.add([2] * 12, 1)
    some.run()
    assert shapes(some) == [(5, 1, 0), *[(1, 0, 1)] * 5, (12, 1, 0)]
    assert waiting.num_preemptions == 0


def test_all_can_be_computed_again() -> None:
    some = world()
    requests = [some.add([n] * 5, 6) for n in range(3)]
    some.step()
    some.step()
    some.scheduler.recompute_all()
    some.check_blocks()
    assert (some.scheduler.num_running, some.scheduler.num_waiting) == (0, 3)
    some.run()
    assert [request.output_tokens for request in requests] == [reference([n] * 5, 6) for n in range(3)]


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_cancelled_between_steps(num_steps: int) -> None:
    some = world(max_tokens=8)
    some.add([1] * 9, 4)
    cancelled = some.add([2] * 9, 4)
    for _ in range(num_steps):
        some.step()
    some.scheduler.end(cancelled)
    assert cancelled.finish_reason is FinishReason.CANCELLED
    some.scheduler.end(cancelled, FinishReason.STOP)
    assert cancelled.finish_reason is FinishReason.CANCELLED
    some.check_blocks()
    some.run()
    assert some.pool.num_available == some.pool.capacity


def test_cancelled_in_a_step() -> None:
    some = world()
    request, other = some.add([1] * 5, 4), some.add([2] * 5, 4)
    step = some.scheduler.schedule()
    assert step is not None
    late = some.add([3], 1)
    some.scheduler.end(request, FinishReason.STOP)
    some.scheduler.end(late)
    some.check_blocks()
    outputs = some.scheduler.commit(step, some.compute(step))
    assert [(output.request, output.token) for output in outputs] == [(other, reference([2] * 5, 1)[0])]
    assert request.finish_reason is FinishReason.STOP
    some.check_blocks()
    some.run()
    assert request.output_tokens == []
    assert other.output_tokens == reference([2] * 5, 4)


def test_an_abandoned_step_is_repeated() -> None:
    some = world()
    request, cancelled = some.add([1] * 5, 4), some.add([2] * 5, 4)
    step = some.scheduler.schedule()
    assert step is not None
    some.scheduler.end(cancelled)
    some.scheduler.abandon(step)
    assert cancelled.is_finished
    some.check_blocks()
    some.run()
    assert shapes(some)[0] == (5, 1, 0)
    assert request.output_tokens == reference([1] * 5, 4)


def test_logits_that_are_not_finite_end_a_request() -> None:
    some = world()
    request = some.add([1] * 5, 4)
    step = some.scheduler.schedule()
    assert step is not None
    [output] = some.scheduler.commit(step, [NOT_FINITE], [0.0], [[]])
    assert (output.token, output.finish_reason) == (None, FinishReason.ERROR)
    assert request.output_tokens == []
    some.check_blocks()


def test_log_probabilities_go_to_those_who_want_them() -> None:
    some = world()
    for wanted in (None, 0, 2):
        some.scheduler.add([1, 2], SamplingParams(max_new_tokens=1, logprobs=wanted))
    step = some.scheduler.schedule()
    assert step is not None
    assert (step.needs.has_logprobs, step.needs.num_top) == (True, 2)
    top = [(5, -0.5), (6, -1.5), (7, -2.5)]
    outputs = some.scheduler.commit(step, [5, 5, 5], [-0.5] * 3, [top] * 3)
    assert [output.logprob for output in outputs] == [None, -0.5, -0.5]
    assert [output.top_logprobs for output in outputs] == [(), (), ((5, -0.5), (6, -1.5))]


def test_needs_of_a_step_are_those_of_requests_that_draw() -> None:
    some = world(max_tokens=4)
    some.scheduler.add([1, 2], SamplingParams(temperature=0))
    some.scheduler.add([1, 2, 3, 4], SamplingParams(top_p=0.5, logprobs=3))
    step = some.scheduler.schedule()
    assert step is not None
    assert step.draws == [True, False]
    assert not step.needs.is_random
    assert not step.needs.has_logprobs
    some.scheduler.commit(step, [1, 1])
    step = some.scheduler.schedule()
    assert step is not None
    assert (step.needs.is_random, step.needs.is_filtered, step.needs.num_top) == (True, True, 3)


def test_seeds_are_those_asked_for_or_differ() -> None:
    def packed(seed: int, wanted: int | None) -> list[bytes]:
        scheduler = Scheduler(world().limits, BlockPool(9, 4), seed=seed)
        return [scheduler.add([1], SamplingParams(seed=wanted)).packed_sampling for _ in range(2)]

    assert packed(0, 5)[0] == packed(1, 5)[1]
    assert len({*packed(0, None), *packed(1, None)}) == 4
    assert packed(3, None) == packed(3, None)


@pytest.mark.parametrize(
    ("prompt", "num_tokens", "codes"),
    [
        ([], 1, ["request-empty"]),
        ([0, 50], 1, ["request-tokens"]),
        ([-1], 1, ["request-tokens"]),
        ([1] * 64, 1, ["request-length"]),
        ([1] * 17, 1, ["request-step"]),
        ([99] * 17, 40, ["request-tokens", "request-step", "request-blocks"]),
    ],
)
def test_requests_that_cannot_be_served(prompt: list[int], num_tokens: int, codes: list[str]) -> None:
    some = world(num_blocks=10, chunked_prefill=False)
    with pytest.raises(RequestError) as caught:
        some.add(prompt, num_tokens)
    assert [problem.code for problem in caught.value.problems] == codes
    assert not some.scheduler.has_work


def test_a_request_may_fill_the_cache() -> None:
    some = world(num_blocks=10)
    request = some.add([1] * 17, 20)
    other = some.add([2] * 17, 20)
    some.run()
    assert request.output_tokens == reference([1] * 17, 20)
    assert other.output_tokens == reference([2] * 17, 20)


def test_steps_alternate_with_commits() -> None:
    some = world()
    some.add([1], 2)
    step = some.scheduler.schedule()
    assert step is not None
    with pytest.raises(LifecycleError, match="neither been committed nor abandoned"):
        some.scheduler.schedule()
    with pytest.raises(LifecycleError, match="being computed"):
        some.scheduler.recompute_all()
    some.scheduler.commit(step, [1])
    with pytest.raises(LifecycleError, match="not the one in flight"):
        some.scheduler.commit(step, [1])


def test_speculation_is_refused() -> None:
    limits = BatchLimits(max_requests=4, max_tokens=16, max_sequence_length=64, tokens_per_decode=2)
    with pytest.raises(ConfigError, match="num-speculative-tokens"):
        Scheduler(limits, BlockPool(9, 4))


def test_shape_of_a_step() -> None:
    some = world()
    some.add([1, 2], 3)
    some.step()
    some.add([3], 1)
    step = some.scheduler.schedule()
    assert step is not None
    assert step.shape == BatchShape(2, 1, 1)
