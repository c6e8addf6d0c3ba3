"""Batches for the training loop: endless, in an order that can be resumed exactly."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphstep.errors import CheckpointError, ConfigError, Problem
from graphstep.training.data.datasets import BlendedDataset, Dataset
from graphstep.training.data.order import BlendOrder, EpochOrder, SampleOrder, pattern_counts

_MAX_POSITION = 2**62
"""More samples than a run can draw; positions beyond it do not fit into 64 bits."""


_OPTIONS: Mapping[str, tuple[str, str]] = {
    "num_samples": ("the number of samples", "--data-path, --split, --seq-length"),
    "sample_length": ("the number of tokens of a sample", "--seq-length"),
    "blend": ("the blend of the sources", "--data-path"),
    "seed": ("the seed", "--seed"),
    "shuffle": ("the switch for shuffling", "order of the samples"),
}
"""What the order depends on -> what to call it, and the options that it follows from."""


class BatchIterator:
    """Endless batches of a dataset.

    Which samples come is a function of the dataset, ``seed``, ``shuffle`` and the number of samples drawn before; the
    batch size only cuts the row of samples. An epoch that ends inside a batch is continued by the next one: no
    sample is dropped. No global random state is read or changed.

    Args:
        dataset: at least one sample.
        micro_batch_size: B.
        seed: of the order, >= 0.
        shuffle: False visits samples from first to last in every epoch.
        start_sample: samples drawn before, by the run that is resumed.
        pin_memory: page-locked tensors, which can be copied to a GPU without waiting.

    Raises:
        ConfigError: ``pin_memory`` on a machine without CUDA.
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        micro_batch_size: int,
        seed: int,
        shuffle: bool = True,
        start_sample: int = 0,
        pin_memory: bool = False,
    ) -> None:
        if micro_batch_size < 1 or start_sample < 0 or len(dataset) < 1:
            raise ValueError(
                "need micro_batch_size >= 1, start_sample >= 0 and a dataset with samples, got "
                f"{micro_batch_size}, {start_sample} and {len(dataset)} samples"
            )
        if pin_memory and not torch.cuda.is_available():
            raise ConfigError(
                Problem(
                    code="pin-memory",
                    what="pinned memory needs a CUDA device, and there is none",
                    where="BatchIterator(pin_memory=True)",
                    fix="use pin_memory=False",
                )
            )
        self._dataset = dataset
        self._micro_batch_size = micro_batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._consumed_samples = start_sample
        self._pin_memory = pin_memory
        self._order = sample_order(dataset, seed=seed, shuffle=shuffle)

    @property
    def consumed_samples(self) -> int:
        """Samples drawn since the beginning of training; the ``start_sample`` of an iterator that goes on from here."""
        return self._consumed_samples

    def __iter__(self) -> BatchIterator:
        return self

    def __next__(self) -> dict[str, Tensor]:
        """The next batch: ``tokens`` and ``labels``, new int64 CPU tensors [B, S]; labels are one token ahead.

        Raises:
            DataError: a sample cannot be read; the iterator still stands before this batch.
        """
        first = self._consumed_samples
        positions = np.arange(first, first + self._micro_batch_size, dtype=np.int64)
        samples = self._order(positions).tolist()
        shape = (self._micro_batch_size, self._dataset.sample_length - 1)
        tokens_BS = torch.empty(shape, dtype=torch.int64, pin_memory=self._pin_memory)
        labels_BS = torch.empty(shape, dtype=torch.int64, pin_memory=self._pin_memory)
        tokens, labels = tokens_BS.numpy(), labels_BS.numpy()
        for row, index in enumerate(samples):
            sample = self._dataset[index]
            tokens[row] = sample[:-1]
            labels[row] = sample[1:]
        self._consumed_samples += self._micro_batch_size
        return {"tokens": tokens_BS, "labels": labels_BS}

    def state_dict(self) -> dict[str, Any]:
        """Position, and what the order depends on: plain numbers, for any format of checkpoint."""
        return {"consumed_samples": self._consumed_samples, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on exactly where ``state`` was taken; the batch size may be another one.

        Raises:
            CheckpointError: the state belongs to another order (data, seed, shuffle): all differences; the iterator is
                unchanged.
        """
        problems = []
        consumed = state.get("consumed_samples")
        position = consumed if isinstance(consumed, int) and not isinstance(consumed, bool) else -1
        if not 0 <= position <= _MAX_POSITION:
            what = f"consumed_samples is {consumed!r}, not a number from 0 to {_MAX_POSITION}"
            fix = "load an older checkpoint by naming its iter_... folder; nothing was loaded"
            problems.append(Problem(code="checkpoint-data", what=what, where="position in the data", fix=fix))
        for name, now in self._identity().items():
            then = state.get(name)
            if then != now:
                called, where = _OPTIONS[name]
                what = f"{called} was {then!r} in the checkpoint and is {now!r} now"
                fix = (
                    "resume with the --data-path, --split, --seq-length and --seed of the run that wrote it, or leave "
                    "--load out to start afresh"
                )
                problems.append(Problem(code="checkpoint-data", what=what, where=where, fix=fix))
        if problems:
            raise CheckpointError(problems)
        self._consumed_samples = position

    def _identity(self) -> dict[str, Any]:
        blend = [1]
        if isinstance(self._dataset, BlendedDataset) and self._dataset.weights is not None:
            blend = pattern_counts(self._dataset.weights)
        return {
            "num_samples": len(self._dataset),
            "sample_length": self._dataset.sample_length,
            "blend": blend,
            "seed": self._seed,
            "shuffle": self._shuffle,
        }


def sample_order(dataset: Dataset, *, seed: int, shuffle: bool) -> SampleOrder:
    """The order of a dataset: weighted for a blend with weights, else all samples once an epoch."""
    if isinstance(dataset, BlendedDataset) and dataset.weights is not None:
        lengths = [len(part) for part in dataset.datasets]
        return BlendOrder(lengths, weights=dataset.weights, seed=seed, shuffle=shuffle)
    return EpochOrder(len(dataset), seed=seed, shuffle=shuffle)
