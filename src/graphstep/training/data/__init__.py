"""Tokens for training: tokenizers, text, indexed datasets, samples and batches."""

from __future__ import annotations

from graphstep.training.data.batches import BatchIterator
from graphstep.training.data.build import Datasets, build_datasets, check_names
from graphstep.training.data.datasets import BlendedDataset, Dataset, MockDataset, TokenWindows
from graphstep.training.data.indexed import IndexedDataset
from graphstep.training.data.indexed_writer import IndexedDatasetWriter
from graphstep.training.data.tokenizers import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, build_tokenizer

__all__ = [
    "BatchIterator",
    "BlendedDataset",
    "ByteTokenizer",
    "Dataset",
    "Datasets",
    "HuggingFaceTokenizer",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "MockDataset",
    "TokenWindows",
    "Tokenizer",
    "build_datasets",
    "build_tokenizer",
    "check_names",
]
