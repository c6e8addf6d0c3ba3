"""Map-style datasets of samples: ``len(dataset)`` and ``dataset[i]``, an int64 array of S + 1 tokens.

The first S tokens of a sample are the input, the last S what the model is to predict.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from graphstep.errors import DataError, Problem

Sample = npt.NDArray[np.int64]


class Dataset(Protocol):
    """What :class:`~graphstep.training.data.batches.BatchIterator` reads."""

    @property
    def sample_length(self) -> int:
        """Tokens of a sample: S + 1."""

    def __len__(self) -> int:
        """Number of samples."""

    def __getitem__(self, index: int, /) -> Sample:
        """Sample ``index``, 0 <= index < len: int64 [S + 1], the caller's own copy."""


class TokenRow(Protocol):
    """Tokens in a row that can be sliced: a NumPy array, a memory map, stitched sequences."""

    def __len__(self) -> int: ...

    def __getitem__(self, key: slice, /) -> npt.NDArray[Any]: ...


class TokenWindows:
    """Windows of S + 1 consecutive tokens, each beginning S tokens after the one before.

    So each token is predicted exactly once, except the first one and those after the last whole window.

    Args:
        tokens: the documents in a row, any integer type.
        seq_length: S.
        start, stop: the range of tokens to use; all by default.
        vocab_size: samples with a token outside ``0 <= token < vocab_size`` are refused when read.
        name: of the source, for messages.
    """

    def __init__(
        self,
        tokens: TokenRow,
        *,
        seq_length: int,
        start: int = 0,
        stop: int | None = None,
        vocab_size: int | None = None,
        name: str = "tokens",
    ) -> None:
        if seq_length < 1:
            raise ValueError(f"seq_length must be >= 1, got {seq_length}")
        self._tokens = tokens
        self._start, stop, _ = slice(start, stop).indices(len(tokens))
        self._vocab_size = vocab_size
        self.num_tokens = max(stop - self._start, 0)
        """Tokens in the range."""
        self.seq_length = seq_length
        self.name = name

    @property
    def sample_length(self) -> int:
        """S + 1."""
        return self.seq_length + 1

    def __len__(self) -> int:
        """Number of whole windows."""
        return max(self.num_tokens - 1, 0) // self.seq_length

    def __getitem__(self, index: int, /) -> Sample:
        """Window ``index``: a new int64 array [S + 1].

        Raises:
            IndexError: no such window.
            DataError: a token does not belong to the vocabulary.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        first = self._start + index * self.seq_length
        sample = self._tokens[first : first + self.seq_length + 1].astype(np.int64)
        if self._vocab_size is not None:
            check_tokens(sample, self._vocab_size, where=f"{self.name}, tokens from {first}")
        return sample


class BlendedDataset:
    """Several datasets as one: the samples of the first, then those of the second, and so on.

    ``weights`` do not change what is in it, but the order in which
    :class:`~graphstep.training.data.batches.BatchIterator` visits it.

    Args:
        datasets: at least one, none empty, all of one sample length.
        weights: share of the samples to draw from each, > 0, of any sum; None draws each sample once an epoch.
    """

    def __init__(self, datasets: Sequence[Dataset], *, weights: Sequence[float] | None = None) -> None:
        lengths = {dataset.sample_length for dataset in datasets}
        if len(lengths) != 1 or not all(len(dataset) for dataset in datasets):
            raise ValueError("a blend needs datasets that are not empty, all of the same sample length")
        if weights is not None and (len(weights) != len(datasets) or not all(weight > 0 for weight in weights)):
            raise ValueError("a blend needs one positive weight for each dataset")
        self.datasets = tuple(datasets)
        self.weights = None if weights is None else tuple(weights)
        self.sample_length = lengths.pop()
        """S + 1."""
        self._ends = list(accumulate(len(dataset) for dataset in datasets))

    @property
    def num_tokens(self) -> int:
        """Tokens in the ranges of all datasets that know it."""
        return sum(int(getattr(dataset, "num_tokens", 0)) for dataset in self.datasets)

    def __len__(self) -> int:
        """Samples of all datasets together."""
        return self._ends[-1]

    def __getitem__(self, index: int, /) -> Sample:
        """Sample ``index``, counted through the datasets one after another."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        which = bisect_right(self._ends, index)
        before = self._ends[which - 1] if which else 0
        return self.datasets[which][index - before]


class MockDataset:
    """Samples that need no file: arithmetic progressions modulo the vocabulary, drawn from the seed.

    Sample ``i`` is a function of ``(seed, stream, i)`` alone. A model can learn it, so that the loss falls.

    Args:
        num_samples: length of the dataset.
        seq_length: S.
        vocab_size: tokens are below it.
        seed, stream: another seed or stream (training, validation) gives other samples.
    """

    def __init__(self, *, num_samples: int, seq_length: int, vocab_size: int, seed: int, stream: int = 0) -> None:
        if min(num_samples, seq_length, vocab_size) < 1:
            raise ValueError("num_samples, seq_length and vocab_size must be >= 1")
        self._num_samples = num_samples
        self._vocab_size = vocab_size
        self._entropy = (seed % 2**64, stream)
        self._positions = np.arange(seq_length + 1, dtype=np.int64)
        self.sample_length = seq_length + 1
        """S + 1."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all samples, each counted where it is predicted."""
        return self._num_samples * (self.sample_length - 1)

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int, /) -> Sample:
        """Sample ``index``: a new int64 array [S + 1]."""
        if not 0 <= index < self._num_samples:
            raise IndexError(f"sample {index} of {self._num_samples}")
        words = np.random.SeedSequence([*self._entropy, index]).generate_state(2, np.uint32)
        first, step = int(words[0]) % self._vocab_size, 1 + int(words[1]) % min(7, self._vocab_size)
        return (first + step * self._positions) % self._vocab_size


def check_tokens(tokens: npt.NDArray[Any], vocab_size: int, *, where: str) -> None:
    """Raise DataError if a token lies outside ``0 <= token < vocab_size``; costs two passes over ``tokens``."""
    if not tokens.size:
        return
    lowest, highest = int(tokens.min()), int(tokens.max())
    if lowest < 0 or highest >= vocab_size:
        bad = lowest if lowest < 0 else highest
        raise DataError(
            Problem(
                code="data-vocabulary",
                what=f"token {bad} is not in the vocabulary of {vocab_size} tokens",
                where=where,
                fix="use the tokenizer that made the data: "
                "--tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.json",
            )
        )
