"""In which order samples are visited: a pure function of the seed and the number of samples drawn before.

Nothing here has a state that matters: position ``g`` (samples drawn since the beginning of training) gives the sample,
in any epoch, so a run can be resumed at any ``g``. Random bits come from Philox through ``SeedSequence``, both of which
NumPy keeps stable between versions; shuffling is a stable sort of these bits, for the same reason.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

_MAX_PATTERN = 1 << 16


class SampleOrder(Protocol):
    """From positions to samples."""

    def __call__(self, positions: IntArray) -> IntArray:
        """Index of the sample at each position, positions being >= 0 and unbounded."""


class EpochOrder:
    """All samples once an epoch, each epoch in another order.

    Args:
        num_samples: of the dataset.
        seed: of the run.
        shuffle: False visits the samples from first to last in every epoch.
        stream: tells apart orders that share a seed.

    Cost: 8 bytes a sample for each of the two epochs last used, and a sort at the beginning of each epoch.
    """

    def __init__(self, num_samples: int, *, seed: int, shuffle: bool, stream: int = 0) -> None:
        self._num_samples = num_samples
        self._seed = seed % 2**64
        self._shuffle = shuffle
        self._stream = stream
        self._permutations: dict[int, IntArray] = {}

    def __call__(self, positions: IntArray) -> IntArray:
        """Index of the sample at each position."""
        epochs, offsets = np.divmod(positions, self._num_samples)
        if not self._shuffle:
            return offsets
        samples = np.empty_like(offsets)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            samples[chosen] = self._permutation(epoch)[offsets[chosen]]
        return samples

    def _permutation(self, epoch: int) -> IntArray:
        found = self._permutations.get(epoch)
        if found is None:
            bits = np.random.Philox(np.random.SeedSequence(self._seed, spawn_key=(self._stream, epoch)))
            keys: npt.NDArray[np.uint64] = bits.random_raw(self._num_samples)
            found = np.argsort(keys, kind="stable").astype(np.int64)
            while len(self._permutations) > 1:  # a batch may cross into the next epoch, so two are kept
                self._permutations.pop(next(iter(self._permutations)))
            self._permutations[epoch] = found
        return found


class BlendOrder:
    """Samples of several datasets in given proportions, each dataset in its own epochs.

    The sources follow a fixed pattern that is repeated for ever and holds the proportions as evenly as can be. The
    ``k``-th sample drawn from a dataset of ``n`` samples is number ``k % n`` of its epoch ``k // n``, so a dataset
    with a large weight is gone through more often than one with a small weight, and all samples of each are used.

    Args:
        lengths: samples of each dataset; the result counts through them one after another.
        weights: > 0, of any sum. Kept exactly when they are fractions with a common denominator up to 65536 after
            division by their sum, else to 1/65536, but never to nothing.
        seed, shuffle: as for :class:`EpochOrder`.
    """

    def __init__(self, lengths: Sequence[int], *, weights: Sequence[float], seed: int, shuffle: bool) -> None:
        counts = pattern_counts(weights)
        self._counts = np.array(counts, dtype=np.int64)
        # Draw k of a source that is drawn c times belongs at (k + 1/2) / c of the pattern.
        places = np.concatenate([(np.arange(count) + 0.5) / count for count in counts])
        arrangement = np.argsort(places, kind="stable")
        self._source = np.repeat(np.arange(len(counts)), counts)[arrangement]
        self._rank = np.concatenate([np.arange(count) for count in counts])[arrangement]
        self._first = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        self._orders = [
            EpochOrder(length, seed=seed, shuffle=shuffle, stream=1 + stream) for stream, length in enumerate(lengths)
        ]

    def __call__(self, positions: IntArray) -> IntArray:
        """Index of the sample at each position."""
        repeats, places = np.divmod(positions, len(self._source))
        sources = self._source[places]
        draws: IntArray = repeats * self._counts[sources] + self._rank[places]
        samples = np.empty_like(draws)
        for source in np.unique(sources).tolist():
            chosen = sources == source
            samples[chosen] = self._first[source] + self._orders[source](draws[chosen])
        return samples


def pattern_counts(weights: Sequence[float]) -> list[int]:
    """How often each source comes in the shortest pattern that keeps the weights; at least once each."""
    # The decimal number that the user wrote, not the binary one nearest to it.
    exact = [Fraction(repr(float(weight))) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    length = math.lcm(*(share.denominator for share in shares))
    if length <= _MAX_PATTERN:
        return [int(share * length) for share in shares]
    return [max(1, round(share * _MAX_PATTERN)) for share in shares]
