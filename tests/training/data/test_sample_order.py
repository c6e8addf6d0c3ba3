from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstep.training.data.order import BlendOrder, EpochOrder, pattern_counts


def positions(start: int, stop: int) -> np.ndarray:
    return np.arange(start, stop, dtype=np.int64)


@given(st.integers(1, 40), st.integers(0, 2**64), st.integers(0, 5))
def test_an_epoch_is_a_permutation(num_samples: int, seed: int, epoch: int) -> None:
    order = EpochOrder(num_samples, seed=seed, shuffle=True)
    found = order(positions(epoch * num_samples, (epoch + 1) * num_samples))
    assert sorted(found.tolist()) == list(range(num_samples))


@given(st.integers(1, 20), st.integers(0, 60), st.integers(0, 60), st.booleans())
def test_order_is_a_function_of_the_position(num_samples: int, start: int, length: int, shuffle: bool) -> None:
    whole = EpochOrder(num_samples, seed=3, shuffle=shuffle)(positions(0, 120))
    part = EpochOrder(num_samples, seed=3, shuffle=shuffle)(positions(start, start + length))
    assert part.tolist() == whole[start : start + length].tolist()


def test_epochs_seeds_and_streams_differ() -> None:
    def first(seed: int = 1, stream: int = 0, epoch: int = 0) -> tuple[int, ...]:
        order = EpochOrder(50, seed=seed, shuffle=True, stream=stream)
        return tuple(order(positions(50 * epoch, 50 * epoch + 50)).tolist())

    assert len({first(), first(seed=2), first(stream=1), first(epoch=1)}) == 4


def test_the_order_itself_is_fixed() -> None:
    # A checkpoint made by one version has to go on in the same order under the next one.
    assert EpochOrder(8, seed=1234, shuffle=True)(positions(0, 16)).tolist() == [
        *[2, 4, 7, 3, 5, 0, 6, 1],
        *[5, 0, 6, 7, 4, 1, 3, 2],
    ]
    assert EpochOrder(3, seed=0, shuffle=False)(positions(0, 5)).tolist() == [0, 1, 2, 0, 1]


@given(
    st.lists(st.tuples(st.integers(1, 12), st.sampled_from([0.1, 0.25, 1.0, 2.0, 3.0])), min_size=1, max_size=4),
    st.booleans(),
)
def test_blend_keeps_weights_and_epochs(sources: list[tuple[int, float]], shuffle: bool) -> None:
    lengths, weights = [length for length, _ in sources], [weight for _, weight in sources]
    counts = pattern_counts(weights)
    firsts = np.concatenate([[0], np.cumsum(lengths)])
    order = BlendOrder(lengths, weights=weights, seed=5, shuffle=shuffle)
    period = sum(counts)
    repeats = -(-2 * max(lengths) // min(counts))
    found = order(positions(0, period * repeats))
    drawn = np.searchsorted(firsts, found, side="right") - 1
    for source, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        samples = (found[drawn == source] - firsts[source]).tolist()
        assert len(samples) == count * repeats
        for epoch in range(len(samples) // length):
            assert sorted(samples[epoch * length : (epoch + 1) * length]) == list(range(length))
        # At every moment each source is within two samples of its share.
        share = np.arange(1, len(drawn) + 1) * count / period
        assert np.abs(np.cumsum(drawn == source) - share).max() <= len(lengths)
    middle = len(found) // 3
    again = BlendOrder(lengths, weights=weights, seed=5, shuffle=shuffle)
    assert again(positions(middle, len(found))).tolist() == found[middle:].tolist()


@pytest.mark.parametrize(
    ("weights", "counts"),
    [([0.3, 0.7], [3, 7]), ([1, 1, 2], [1, 1, 2]), ([5], [1]), ([0.1, 0.2], [1, 2]), ([1e-05, 1], [1, 65535])],
)
def test_patterns(weights: list[float], counts: list[int]) -> None:
    assert pattern_counts(weights) == counts


def test_pattern_is_even() -> None:
    order = BlendOrder([100, 100], weights=[0.25, 0.75], seed=0, shuffle=False)
    assert (order(positions(0, 8)) >= 100).astype(int).tolist() == [1, 0, 1, 1, 1, 0, 1, 1]
