from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstep.errors import DataError
from graphstep.training.data import BlendedDataset, MockDataset, TokenWindows


@given(st.integers(0, 60), st.integers(1, 9), st.integers(0, 60), st.integers(0, 60))
def test_windows(num_tokens: int, seq_length: int, start: int, stop: int) -> None:
    tokens = np.arange(num_tokens, dtype=np.uint16)
    windows = TokenWindows(tokens, seq_length=seq_length, start=start, stop=stop)
    expected = list(range(num_tokens))[start:stop]
    samples = [windows[index] for index in range(len(windows))]
    assert windows.num_tokens == len(expected)
    assert all(sample.shape == (seq_length + 1,) and sample.dtype == np.int64 for sample in samples)
    labels = [token for sample in samples for token in sample[1:].tolist()]
    assert labels == expected[1 : 1 + len(samples) * seq_length]
    assert len(expected) - 1 - len(labels) < seq_length
    with pytest.raises(IndexError):
        windows[len(windows)]
    with pytest.raises(IndexError):
        windows[-1]


def test_a_sample_is_the_callers_own() -> None:
    tokens = np.arange(5)
    windows = TokenWindows(tokens, seq_length=2)
    windows[0][:] = 9
    assert tokens.tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("bad", [7, -1])
def test_token_outside_the_vocabulary(bad: int) -> None:
    windows = TokenWindows(np.array([0, 1, 2, bad, 4]), seq_length=2, vocab_size=7, name="some/file")
    assert windows[0].tolist() == [0, 1, 2]
    with pytest.raises(DataError, match=f"token {bad} is not in the vocabulary of 7") as caught:
        windows[1]
    assert caught.value.problems[0].where == "some/file, tokens from 2"


def test_blend_counts_through_its_parts() -> None:
    parts = [TokenWindows(np.arange(first, first + 5), seq_length=2) for first in (0, 10, 20)]
    blend = BlendedDataset(parts)
    assert [blend[index][0] for index in range(len(blend))] == [0, 2, 10, 12, 20, 22]
    assert (blend.sample_length, blend.num_tokens) == (3, 15)
    for index in (-1, 6):
        with pytest.raises(IndexError):
            blend[index]


def test_blend_refuses_what_it_cannot_mix() -> None:
    windows = TokenWindows(np.arange(5), seq_length=2)
    for parts in ([], [windows, TokenWindows(np.arange(5), seq_length=3)], [windows, TokenWindows([], seq_length=2)]):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="a blend needs"):
            BlendedDataset(parts)
    for weights in ([1.0], [1.0, 0.0]):
        with pytest.raises(ValueError, match="positive weight"):
            BlendedDataset([windows, windows], weights=weights)
    with pytest.raises(ValueError, match="seq_length"):
        TokenWindows(np.arange(5), seq_length=0)


@given(st.integers(1, 300), st.integers(-5, 2**70), st.integers(0, 30))
def test_mock_samples(vocab_size: int, seed: int, index: int) -> None:
    def dataset(stream: int = 0) -> MockDataset:
        return MockDataset(num_samples=31, seq_length=8, vocab_size=vocab_size, seed=seed, stream=stream)

    sample = dataset()[index]
    assert sample.tolist() == dataset()[index].tolist()
    assert ((sample >= 0) & (sample < vocab_size)).all()
    assert sample.shape == (9,)
    steps = (sample[1:] - sample[:-1]) % vocab_size
    assert len(set(steps.tolist())) == 1


def test_mock_samples_differ() -> None:
    def samples(**changes: int) -> list[list[int]]:
        options = {"seed": 1, "stream": 0, **changes}
        dataset = MockDataset(num_samples=20, seq_length=4, vocab_size=1000, **options)
        assert (len(dataset), dataset.sample_length, dataset.num_tokens) == (20, 5, 80)
        return [dataset[index].tolist() for index in range(20)]

    assert samples() != samples(seed=2) != samples(stream=1)
    assert len({tuple(sample) for sample in samples()}) > 15
    with pytest.raises(IndexError):
        MockDataset(num_samples=1, seq_length=4, vocab_size=9, seed=0)[1]
    with pytest.raises(ValueError, match=">= 1"):
        MockDataset(num_samples=0, seq_length=4, vocab_size=9, seed=0)
