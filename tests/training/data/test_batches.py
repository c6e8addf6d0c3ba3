from __future__ import annotations

import json
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphstep.errors import CheckpointError, ConfigError, DataError
from graphstep.training.data import BatchIterator, BlendedDataset, TokenWindows

SEQ_LENGTH = 3


def windows(num_samples: int, first: int = 0) -> TokenWindows:
    return TokenWindows(np.arange(first, first + num_samples * SEQ_LENGTH + 1), seq_length=SEQ_LENGTH)


def firsts(iterator: BatchIterator, num_batches: int) -> list[int]:
    return [token for batch in islice(iterator, num_batches) for token in batch["tokens"][:, 0].tolist()]


def test_a_batch() -> None:
    batch = next(BatchIterator(windows(4), micro_batch_size=2, seed=0, shuffle=False))
    assert set(batch) == {"tokens", "labels"}
    assert batch["tokens"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert batch["labels"].tolist() == [[1, 2, 3], [4, 5, 6]]
    for tensor in batch.values():
        assert (tensor.dtype, tensor.device.type, tensor.is_contiguous()) == (torch.int64, "cpu", True)


def test_batches_share_no_memory() -> None:
    iterator = BatchIterator(windows(4), micro_batch_size=2, seed=0, shuffle=False)
    first = next(iterator)
    kept = first["tokens"].clone()
    next(iterator)["tokens"].fill_(99)
    assert torch.equal(first["tokens"], kept)


@given(st.integers(1, 10), st.integers(1, 25), st.booleans())
def test_nothing_is_dropped(num_samples: int, micro_batch_size: int, shuffle: bool) -> None:
    iterator = BatchIterator(windows(num_samples), micro_batch_size=micro_batch_size, seed=1, shuffle=shuffle)
    drawn = firsts(iterator, 3 * num_samples)
    for epoch in range(3 * micro_batch_size):
        part = drawn[epoch * num_samples : (epoch + 1) * num_samples]
        assert sorted(part) == list(range(0, num_samples * SEQ_LENGTH, SEQ_LENGTH))


@given(st.integers(1, 10), st.integers(1, 6), st.integers(1, 6), st.integers(0, 12), st.booleans())
def test_exact_resume(num_samples: int, before: int, after: int, num_batches: int, is_blend: bool) -> None:
    dataset = windows(num_samples)
    if is_blend:
        dataset = BlendedDataset([dataset, windows(4, first=1000)], weights=[0.3, 0.7])  # type: ignore[assignment]
    run = BatchIterator(dataset, micro_batch_size=before, seed=7)
    whole = firsts(BatchIterator(dataset, micro_batch_size=1, seed=7), before * num_batches + after * 9)
    drawn = firsts(run, num_batches)
    state = json.loads(json.dumps(run.state_dict()))
    resumed = BatchIterator(dataset, micro_batch_size=after, seed=7)
    resumed.load_state_dict(state)
    by_start = BatchIterator(dataset, micro_batch_size=after, seed=7, start_sample=run.consumed_samples)
    rest = firsts(resumed, 9)
    assert drawn + rest == whole
    assert firsts(by_start, 9) == rest
    assert resumed.state_dict() == by_start.state_dict()


def test_two_iterators_do_not_notice_each_other() -> None:
    alone = firsts(BatchIterator(windows(9), micro_batch_size=2, seed=3), 12)
    one, other = (BatchIterator(windows(9), micro_batch_size=2, seed=seed) for seed in (3, 4))
    mixed = []
    for _ in range(12):
        mixed += firsts(one, 1)
        torch.rand(3)
        np.random.rand(3)
        firsts(other, 1)
    assert mixed == alone


def test_global_generators_are_untouched() -> None:
    torch_before, numpy_before = torch.get_rng_state(), repr(np.random.get_state())
    firsts(BatchIterator(windows(9), micro_batch_size=2, seed=3), 12)
    assert torch.equal(torch.get_rng_state(), torch_before)
    assert repr(np.random.get_state()) == numpy_before


def test_state_of_another_order_is_refused() -> None:
    state = BatchIterator(windows(9), micro_batch_size=2, seed=3).state_dict()
    other = BatchIterator(windows(8), micro_batch_size=2, seed=4, shuffle=False, start_sample=5)
    with pytest.raises(CheckpointError) as caught:
        other.load_state_dict(state)
    where = ["--data-path, --split, --seq-length", "--seed", "order of the samples"]
    assert [problem.where for problem in caught.value.problems] == where
    assert "iterator" not in str(caught.value)
    assert other.consumed_samples == 5
    for bad in (None, -1, "3", 1.5, True, 2**63, 10**30):
        with pytest.raises(CheckpointError, match="consumed_samples"):
            other.load_state_dict({**other.state_dict(), "consumed_samples": bad})
    weighted = BatchIterator(BlendedDataset([windows(4), windows(5)], weights=[1, 2]), micro_batch_size=2, seed=3)
    with pytest.raises(CheckpointError, match="blend"):
        weighted.load_state_dict(state)


def test_bad_sample_leaves_the_position() -> None:
    dataset = TokenWindows(np.array([0, 1, 2, 3, 4, 5, 60]), seq_length=3, vocab_size=50)
    iterator = BatchIterator(dataset, micro_batch_size=1, seed=0, shuffle=False)
    next(iterator)
    for _ in range(2):
        with pytest.raises(DataError):
            next(iterator)
    assert iterator.consumed_samples == 1


@pytest.mark.parametrize("options", [{"micro_batch_size": 0}, {"start_sample": -1}])
def test_arguments_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="micro_batch_size >= 1"):
        BatchIterator(windows(1), **{"micro_batch_size": 1, "seed": 0, **options})
    with pytest.raises(ValueError, match="0 samples"):
        BatchIterator(windows(0), micro_batch_size=1, seed=0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks for an error of machines without CUDA")
def test_pinned_memory_needs_cuda() -> None:
    with pytest.raises(ConfigError, match="pinned memory needs a CUDA device"):
        BatchIterator(windows(1), micro_batch_size=1, seed=0, pin_memory=True)


@pytest.mark.gpu
def test_pinned_memory() -> None:
    batch = next(BatchIterator(windows(2), micro_batch_size=2, seed=0, shuffle=False, pin_memory=True))
    assert all(tensor.is_pinned() for tensor in batch.values())
    assert batch["tokens"].tolist() == [[0, 1, 2], [3, 4, 5]]
