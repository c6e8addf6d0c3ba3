from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstep.config import InferenceConfig
from graphstep.inference.ladder import Ladder, build_ladder
from graphstep.inference.matching import GraphMatcher, NoBucket
from graphstep.inference.shapes import BatchLimits, BatchShape


def matcher(*buckets: tuple[int, int, int], strict: bool = False) -> GraphMatcher:
    shapes = tuple(BatchShape(*bucket) for bucket in buckets)
    return GraphMatcher(Ladder(shapes, tuple({shape.tokens for shape in shapes})), strict=strict)


LIMITS = BatchLimits(max_requests=16, max_tokens=128, max_sequence_length=64)
BUCKETS = ((64, 4, 12), (64, 1, 15), (32, 1, 15), (16, 0, 16), (8, 0, 8))


@pytest.mark.parametrize(
    ("step", "bucket", "reason"),
    [
        ((5, 0, 5), (8, 0, 8), None),
        ((8, 0, 8), (8, 0, 8), None),
        ((9, 0, 9), (16, 0, 16), None),
        ((17, 0, 17), None, NoBucket.TOO_MANY_TOKENS),
        ((9, 0, 17), None, NoBucket.TOO_MANY_REQUESTS),
        ((12, 0, 4), (16, 0, 16), None),
        ((20, 1, 3), (32, 1, 15), None),
        ((40, 1, 3), (64, 1, 15), None),
        ((20, 2, 3), (64, 4, 12), None),
        ((20, 4, 13), None, NoBucket.TOO_MANY_REQUESTS),
        ((65, 1, 1), None, NoBucket.TOO_MANY_TOKENS),
    ],
)
def test_smallest_that_fits(
    step: tuple[int, int, int], bucket: tuple[int, int, int] | None, reason: NoBucket | None
) -> None:
    match = matcher(*BUCKETS).match(BatchShape(*step))
    assert match.bucket == (None if bucket is None else BatchShape(*bucket))
    assert match.reason is reason


def test_strict_gives_no_prefill_place_to_decode() -> None:
    step = BatchShape(30, 2, 13)
    assert matcher(*BUCKETS).match(step).bucket == BatchShape(64, 4, 12)
    assert matcher(*BUCKETS, strict=True).match(step).reason is NoBucket.TOO_MANY_REQUESTS


def test_reasons_without_graphs() -> None:
    assert matcher().match(BatchShape(1, 0, 1)).reason is NoBucket.NO_GRAPHS
    assert matcher().match(BatchShape(4, 1, 0)).reason is NoBucket.NO_GRAPHS
    assert matcher((8, 0, 8)).match(BatchShape(4, 1, 0)).reason is NoBucket.DECODE_ONLY
    assert matcher((8, 1, 7)).match(BatchShape(4, 0, 4)).reason is NoBucket.NO_GRAPHS
    assert not matcher((8, 0, 8)).has_mixed


@pytest.mark.parametrize(
    ("prefill", "decode", "expected"), [(1, 0, 64), (4, 12, 64), (4, 13, 0), (5, 0, 0), (1, 15, 64)]
)
def test_most_tokens(prefill: int, decode: int, expected: int) -> None:
    assert matcher(*BUCKETS).most_tokens(prefill, decode) == expected


def test_coverage_is_said() -> None:
    assert list(matcher(*BUCKETS).coverage(LIMITS)) == [
        "decode steps of 1 to 16 requests have graphs",
        "steps with prefill have graphs up to 64 tokens of 128",
    ]
    assert list(matcher((8, 0, 8)).coverage(LIMITS)) == [
        "decode steps without a graph: 9-16 requests",
        "steps with prefill have no graphs",
    ]
    assert list(matcher().coverage(LIMITS)) == ["no step has a graph"]


shapes = st.builds(BatchShape, st.integers(1, 40), st.integers(0, 6), st.integers(0, 20))


@given(st.lists(shapes.filter(lambda shape: shape.requests > 0)), shapes, st.booleans())
def test_match_is_the_smallest_of_all_that_fit(buckets: list[BatchShape], step: BatchShape, strict: bool) -> None:
    fitting = [bucket for bucket in buckets if step.fits(bucket, strict=strict)]
    match = GraphMatcher(Ladder(tuple(buckets), ()), strict=strict).match(step)
    assert match.bucket == min(fitting, default=None)
    assert (match.reason is None) == bool(fitting)


@given(st.lists(shapes.filter(lambda shape: shape.requests > 0)), st.integers(1, 6), st.integers(0, 9))
def test_most_tokens_is_a_limit(buckets: list[BatchShape], prefill: int, decode: int) -> None:
    found = GraphMatcher(Ladder(tuple(buckets), ()))
    most = found.most_tokens(prefill, decode)
    assert found.match(BatchShape(most + 1, prefill, decode)).bucket is None
    if most:
        assert found.match(BatchShape(most, prefill, decode)).bucket is not None


@given(st.integers(1, 100), st.integers(1, 3), st.sampled_from(["exponential", "linear"]), st.integers(1, 100))
def test_every_decode_step_finds_a_bucket(requests: int, each: int, distribution: str, running: int) -> None:
    limits = BatchLimits(
        max_requests=requests, max_tokens=requests * each, max_sequence_length=64, tokens_per_decode=each
    )
    options = InferenceConfig(
        inference_dynamic_batching_cuda_graph_sizing_distribution=distribution,  # type: ignore[arg-type]
    )
    running = min(running, requests)
    bucket = GraphMatcher(build_ladder(options, limits, 4)).match(BatchShape(running * each, 0, running)).bucket
    assert bucket is not None
    assert bucket.is_decode_only
