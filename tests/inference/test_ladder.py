from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstep.config import InferenceConfig
from graphstep.inference.ladder import build_ladder, mixed_ceiling, token_counts
from graphstep.inference.shapes import BatchLimits, BatchShape


def options(distribution: str = "exponential", **others: Any) -> InferenceConfig:
    return InferenceConfig(
        inference_dynamic_batching_cuda_graph_sizing_distribution=distribution,  # type: ignore[arg-type]
        **others,
    )


def limits(max_requests: int = 256, max_tokens: int = 2048, **others: Any) -> BatchLimits:
    return BatchLimits(max_requests=max_requests, max_tokens=max_tokens, **{"max_sequence_length": 4096} | others)


@pytest.mark.parametrize(
    ("distribution", "num_graphs", "ceiling", "multiple", "expected"),
    [
        ("exponential", 1, 80, 1, [80]),
        ("exponential", 0, 80, 1, [80]),
        ("exponential", 2, 80, 1, [80, 1]),
        ("exponential", 4, 80, 1, [80, 40, 20, 1]),
        ("exponential", 8, 80, 1, [80, 40, 20, 10, 4, 2, 1]),
        ("exponential", -1, 80, 1, [80, 40, 20, 10, 4, 2, 1]),
        ("exponential", 100, 80, 1, [80, 40, 20, 10, 4, 2, 1]),
        ("exponential", 4, 7, 1, [7, 6, 2, 1]),
        ("exponential", -1, 1, 1, [1]),
        ("exponential", -1, 64, 4, [64, 32, 16, 8, 4]),
        ("exponential", 3, 64, 4, [64, 32, 4]),
        ("linear", 1, 80, 1, [80]),
        ("linear", 4, 80, 1, [80, 60, 40, 20]),
        ("linear", 3, 80, 1, [80, 56, 28]),
        ("linear", 4, 64, 6, [60, 54, 36, 18]),
        ("linear", -1, 3, 1, [3, 2, 1]),
        ("linear", -1, 24, 4, [24, 16, 8, 4]),
        ("linear", -1, 20, 1, [20, 16, 8, 4, 2, 1]),
    ],
)
def test_token_counts(distribution: str, num_graphs: int, ceiling: int, multiple: int, expected: list[int]) -> None:
    unlimited = limits(multiple * 1000, multiple * 1000, token_multiple=multiple)
    assert list(token_counts(options(distribution), unlimited, num_graphs, ceiling)) == expected


def counts_by_the_rule(num_graphs: int, ceiling: int, multiple: int) -> list[int]:
    """Halve up to N times, round down to even (2 at least) and up to the multiple; drop the second smallest."""
    number = max(4, math.floor(math.log2(ceiling)) + 2) if num_graphs == -1 else num_graphs
    top = ceiling // multiple * multiple
    if number == 1:
        return [top]
    counts, size = {top, multiple}, ceiling
    for _ in range(number):
        counts.add(-(-max(size // 2 * 2, 2) // multiple) * multiple)
        size //= 2
        if size == 0:
            break
    left = sorted((count for count in counts if count <= top), reverse=True)
    while len(left) > number:
        del left[-2]
    return left


@given(st.sampled_from([-1, *range(1, 20)]), st.integers(1, 3000), st.integers(1, 8))
def test_exponential_counts_follow_the_rule(num_graphs: int, ceiling: int, multiple: int) -> None:
    ceiling = max(ceiling, multiple)
    unlimited = limits(multiple * 5000, multiple * 5000, token_multiple=multiple)
    found = token_counts(options(), unlimited, num_graphs, ceiling)
    assert list(found) == counts_by_the_rule(num_graphs, ceiling, multiple)


def test_automatic_linear_counts_grow_in_steps() -> None:
    counts = token_counts(options("linear"), limits(), -1, 300)
    assert list(counts) == [300, 288, 272, 256, *range(248, 7, -8), 4, 2, 1]


@pytest.mark.parametrize("num_graphs", [1, 16, 32, -1])
@pytest.mark.parametrize("distribution", ["exponential", "linear"])
def test_mixed_and_decode_steps_have_the_same_token_counts(distribution: str, num_graphs: int) -> None:
    """Under equal ceilings, so that ranks that differ in having prefill find buckets of equal size."""
    ladder = build_ladder(options(distribution, inference_cuda_graph_max_tokens=256), limits(), num_graphs)
    decode = {bucket.tokens for bucket in ladder.buckets if bucket.is_decode_only}
    mixed = {bucket.tokens for bucket in ladder.buckets if not bucket.is_decode_only}
    assert mixed <= decode
    assert all(count < 16 for count in decode - mixed)


def test_exponential_buckets_have_powers_of_two_of_prefill() -> None:
    ladder = build_ladder(options(inference_cuda_graph_max_tokens=16), limits(6, 64), 2)
    assert ladder.token_counts == (16, 6, 1)
    assert [bucket for bucket in ladder.buckets if bucket.tokens == 16] == [
        BatchShape(16, 6, 0),
        BatchShape(16, 1, 0),
        BatchShape(16, 4, 2),
        BatchShape(16, 2, 4),
        BatchShape(16, 1, 5),
    ]
    assert [bucket for bucket in ladder.buckets if bucket.is_decode_only] == [BatchShape(6, 0, 6), BatchShape(1, 0, 1)]


def test_linear_buckets_have_one_prefill_count() -> None:
    chosen = options(
        "linear", inference_cuda_graph_max_tokens=16, inference_dynamic_batching_cuda_graph_mixed_prefill_count=3
    )
    ladder = build_ladder(chosen, limits(8, 64, max_sequence_length=4), 2)
    assert [bucket for bucket in ladder.buckets if bucket.prefill] == [
        BatchShape(16, 4, 0),  # three prompts of at most four tokens do not fill it
        BatchShape(16, 3, 5),
        BatchShape(8, 3, 0),
        BatchShape(8, 3, 5),
    ]


def test_the_smallest_units_are_buckets_of_an_automatic_ladder() -> None:
    ladder = build_ladder(options("linear"), limits(8, 64, tokens_per_decode=3, token_multiple=2), -1)
    decode = [bucket for bucket in ladder.buckets if bucket.is_decode_only]
    assert decode == [BatchShape(24, 0, 8), BatchShape(12, 0, 4), BatchShape(6, 0, 2)]


@pytest.mark.parametrize(
    "decode_only",
    [
        {"decode_only_cuda_graphs": True},
        {"inference_dynamic_batching_cuda_graph_mixed_prefill_count": 0},
        {"inference_dynamic_batching_cuda_graph_mixed_prefill_count": -3},
    ],
)
def test_decode_only(decode_only: dict[str, Any]) -> None:
    ladder = build_ladder(options(**decode_only), limits(), 16)
    assert ladder.token_counts[0] == 256
    assert all(bucket.is_decode_only for bucket in ladder.buckets)


def test_no_graphs() -> None:
    assert build_ladder(options(), limits(), None).buckets == ()


@pytest.mark.parametrize(
    ("wanted", "all_prefills", "expected"), [(512, False, 512), (100, False, 256), (9999, False, 2048), (1, True, 2048)]
)
def test_ceiling_lies_between_decode_and_all_tokens(wanted: int, all_prefills: bool, expected: int) -> None:
    chosen = options(inference_cuda_graph_max_tokens=wanted, inference_cuda_graph_all_prefills=all_prefills)
    assert mixed_ceiling(chosen, limits()) == expected
    assert max(build_ladder(chosen, limits(), 4).token_counts) == expected


def test_ceiling_is_no_more_than_sequences_have() -> None:
    short = limits(4, 64, max_sequence_length=8)
    assert mixed_ceiling(options(), short) == 32
    assert build_ladder(options(), short, 4).token_counts[0] == 32


def test_batch_invariant_counts_are_multiples_of_64() -> None:
    ladder = build_ladder(options(), limits(48, 500, batch_invariant=True), 16)
    assert ladder.token_counts == (512, 256, 128, 64)
    assert BatchShape(64, 0, 48) in ladder.buckets


def test_capture_begins_with_most_tokens() -> None:
    ladder = build_ladder(options(), limits(), 16)
    tokens = [bucket.tokens for bucket in ladder.capture_order()]
    assert tokens == sorted(tokens, reverse=True)
    assert set(ladder.capture_order()) == set(ladder.buckets)


chosen_limits = st.builds(
    lambda requests, each, multiple, more, length, invariant: BatchLimits(
        max_requests=requests * multiple,
        max_tokens=(requests * each + more) * multiple,
        max_sequence_length=length + each,
        tokens_per_decode=each,
        token_multiple=multiple,
        batch_invariant=invariant,
    ),
    st.integers(1, 60),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(0, 300),
    st.integers(1, 200),
    st.booleans(),
)
chosen_options = st.builds(
    options,
    st.sampled_from(["exponential", "linear"]),
    inference_cuda_graph_max_tokens=st.integers(1, 600),
    inference_cuda_graph_all_prefills=st.booleans(),
    inference_dynamic_batching_cuda_graph_mixed_prefill_count=st.integers(-1, 20),
)
chosen_numbers = st.sampled_from([-1, 1, 2, 3, 7, 16, 100])


@given(chosen_options, chosen_limits, chosen_numbers)
def test_every_bucket_is_a_step_there_can_be(options: InferenceConfig, limits: BatchLimits, number: int) -> None:
    ladder = build_ladder(options, limits, number)
    assert len(set(ladder.buckets)) == len(ladder.buckets)
    keys = [(b.tokens - b.decode * limits.tokens_per_decode, b.decode) for b in ladder.buckets]
    assert keys == sorted(keys, reverse=True)
    for bucket in ladder.buckets:
        assert limits.allows(bucket)
        assert bucket.tokens % limits.padding_multiple == 0
        assert bucket.tokens <= limits.padded_tokens(limits.max_tokens)
    if number > 0:
        decode = {bucket.tokens for bucket in ladder.buckets if bucket.is_decode_only}
        assert len(decode) <= number


@given(chosen_options, chosen_limits, chosen_numbers)
def test_the_maximum_is_a_bucket(options: InferenceConfig, limits: BatchLimits, number: int) -> None:
    """So that no decode step is left without one."""
    largest = max(bucket for bucket in build_ladder(options, limits, number).buckets if bucket.is_decode_only)
    assert largest.decode == limits.max_requests
    assert largest.tokens == limits.padded_tokens(limits.decode_bound)


@given(chosen_limits, chosen_numbers, st.integers(1, 600))
def test_every_prefill_up_to_the_ceiling_has_a_bucket(limits: BatchLimits, number: int, ceiling: int) -> None:
    chosen = options(inference_cuda_graph_max_tokens=ceiling)
    most = mixed_ceiling(chosen, limits) // limits.token_multiple * limits.token_multiple
    ladder = build_ladder(chosen, limits, number)
    step = BatchShape(most, limits.max_requests, 0)
    if most >= 2 and limits.allows(step):
        assert any(step.fits(bucket) for bucket in ladder.buckets)
