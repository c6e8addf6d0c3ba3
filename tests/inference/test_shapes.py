from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstep.errors import ConfigError
from graphstep.inference.shapes import BatchLimits, BatchShape

LIMITS = BatchLimits(max_requests=8, max_tokens=64, max_sequence_length=16)


def test_order_is_tokens_then_prefill_then_decode() -> None:
    shapes = [BatchShape(8, 0, 8), BatchShape(8, 1, 2), BatchShape(8, 0, 4), BatchShape(4, 4, 0), BatchShape(9, 0, 1)]
    assert sorted(shapes) == [
        BatchShape(4, 4, 0),
        BatchShape(8, 0, 4),
        BatchShape(8, 0, 8),
        BatchShape(8, 1, 2),
        BatchShape(9, 0, 1),
    ]
    assert len({BatchShape(8, 0, 8), BatchShape(8, 0, 8)}) == 1


@pytest.mark.parametrize(
    ("step", "bucket", "fits", "fits_strictly"),
    [
        (BatchShape(4, 0, 4), BatchShape(8, 0, 8), True, True),
        (BatchShape(9, 0, 8), BatchShape(8, 0, 8), False, False),
        (BatchShape(8, 0, 8), BatchShape(16, 0, 4), False, False),
        (BatchShape(4, 0, 4), BatchShape(16, 4, 12), False, False),
        (BatchShape(10, 1, 3), BatchShape(16, 0, 16), False, False),
        (BatchShape(10, 1, 3), BatchShape(16, 1, 15), True, True),
        (BatchShape(10, 2, 3), BatchShape(16, 1, 15), False, False),
        (BatchShape(10, 1, 3), BatchShape(16, 4, 0), True, False),
        (BatchShape(10, 1, 4), BatchShape(16, 4, 0), False, False),
    ],
)
def test_fits(step: BatchShape, bucket: BatchShape, fits: bool, fits_strictly: bool) -> None:
    assert step.fits(bucket) is fits
    assert step.fits(bucket, strict=True) is fits_strictly


@pytest.mark.parametrize(
    ("shape", "allowed"),
    [
        (BatchShape(8, 0, 8), True),
        (BatchShape(9, 0, 9), False),
        (BatchShape(7, 0, 8), False),
        (BatchShape(9, 0, 8), False),
        (BatchShape(0, 0, 0), False),
        (BatchShape(4, 4, 4), False),
        (BatchShape(17, 1, 1), True),
        (BatchShape(18, 1, 1), False),
        (BatchShape(4, -1, 3), False),
        (BatchShape(4, 5, -1), False),
    ],
)
def test_allowed_shapes(shape: BatchShape, allowed: bool) -> None:
    assert LIMITS.allows(shape) is allowed


def test_speculative_decode_requests_have_several_tokens() -> None:
    limits = BatchLimits(max_requests=8, max_tokens=64, max_sequence_length=16, tokens_per_decode=3)
    assert limits.decode_bound == 24
    assert limits.allows(BatchShape(24, 0, 8))
    assert not limits.allows(BatchShape(23, 0, 8))


@given(st.integers(1, 10_000), st.integers(1, 12), st.booleans())
def test_padded_tokens_are_the_next_multiple(tokens: int, multiple: int, invariant: bool) -> None:
    limits = BatchLimits(
        max_requests=multiple,
        max_tokens=multiple,
        max_sequence_length=1,
        token_multiple=multiple,
        batch_invariant=invariant,
    )
    padded = limits.padded_tokens(tokens)
    assert padded % multiple == 0
    assert padded % (64 if invariant else 1) == 0
    assert 0 <= padded - tokens < limits.padding_multiple
    assert limits.eager_shape(BatchShape(tokens, 1, 2)) == BatchShape(padded, 1, 2)


def test_all_problems_of_limits_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        BatchLimits(max_requests=7, max_tokens=5, max_sequence_length=0, token_multiple=2)
    text = str(caught.value)
    assert [problem.code for problem in caught.value.problems] == [
        "batch-limit",
        "batch-limit-multiple",
        "batch-limit-multiple",
        "batch-limit-decode",
    ]
    assert "max_sequence_length must be at least 1, got 0" in text
    assert "max_tokens 7 or more" in text
