"""Reader of the Megatron indexed dataset (``prefix.bin`` and ``prefix.idx``), memory-mapped and never copied.

Layout of ``.idx``, little-endian, without padding: 9 bytes ``MMIDIDX\\0\\0``; uint64 version (1); uint8 code of the
token type; uint64 number of sequences; uint64 number of document indices; int32 length of each sequence in tokens;
int64 byte offset of each sequence in ``.bin``; int64 document indices (document ``d`` is the sequences from index ``d``
up to index ``d + 1``). ``.bin`` holds the tokens and nothing else.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from graphstep.errors import DataError, Problem

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
DTYPE_OF_CODE: Mapping[int, np.dtype[Any]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
"""Token types by their code in the header. Codes 6 and 7 are floating point: no tokens."""

HEADER = struct.Struct("<9sQBQQ")
_CHUNK = 1 << 20
_REBUILD = "make the file again from the source text, or copy it again completely"


def index_path(prefix: str | Path) -> Path:
    """``prefix.idx``."""
    return Path(f"{prefix}.idx")


def data_path(prefix: str | Path) -> Path:
    """``prefix.bin``."""
    return Path(f"{prefix}.bin")


class IndexedDataset:
    """Sequences of tokens in ``prefix.bin``, found through ``prefix.idx``.

    Everything is a read-only view of the mapped files. The whole index is checked once on opening, a few hundred
    megabytes of index a second; ``.bin`` is only opened.

    Args:
        prefix: path without ``.bin`` and ``.idx``.

    Raises:
        DataError: a file is missing, truncated or malformed; nothing stays open.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        idx, bin_ = index_path(prefix), data_path(prefix)
        problems = [problem for problem in (_missing(idx, bin_), _missing(bin_, idx)) if problem]
        if problems:
            raise DataError(problems)
        self.dtype, num_sequences, num_indices = _read_header(idx)
        self.sizes: npt.NDArray[np.int32]
        """[number of sequences] tokens of each sequence."""
        self.document_indices: npt.NDArray[np.int64]
        """[number of documents + 1] first sequence of each document, and the end."""
        raw = _map(idx, np.dtype("u1"))
        sizes_end = HEADER.size + 4 * num_sequences
        pointers_end = sizes_end + 8 * num_sequences
        self.sizes = raw[HEADER.size : sizes_end].view("<i4")
        self._pointers: npt.NDArray[np.int64] = raw[sizes_end:pointers_end].view("<i8")
        self.document_indices = raw[pointers_end : pointers_end + 8 * num_indices].view("<i8")
        self.num_tokens, self._is_contiguous = self._check_index(idx, bin_, bin_.stat().st_size)
        self._bin = _map(bin_, np.dtype("u1"))

    @property
    def num_documents(self) -> int:
        """Number of documents, each one or more sequences."""
        return max(len(self.document_indices) - 1, 0)

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.sizes)

    def __getitem__(self, index: int) -> npt.NDArray[Any]:
        """Tokens of one sequence: read-only view of the file, of the file's token type."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"sequence {index} of {len(self)}")
        start = int(self._pointers[index])
        return self._bin[start : start + int(self.sizes[index]) * self.dtype.itemsize].view(self.dtype)

    def tokens(self) -> npt.NDArray[Any] | StitchedTokens:
        """All sequences one after another, in the order of the index.

        Returns:
            A view of ``.bin`` when the sequences lie there back to back, as writers leave them; else an object that can
            be sliced the same way and gathers the sequences on each read.
        """
        if self._is_contiguous:
            start = int(self._pointers[0]) if len(self) else 0
            return self._bin[start : start + self.num_tokens * self.dtype.itemsize].view(self.dtype)
        return StitchedTokens(self)

    def _check_index(self, idx: Path, bin_: Path, bin_bytes: int) -> tuple[int, bool]:
        """Number of tokens, and whether the sequences lie back to back; in chunks, to need little memory."""
        itemsize = self.dtype.itemsize
        num_tokens, contiguous, expected = 0, True, int(self._pointers[0]) if len(self) else 0
        for start in range(0, len(self), _CHUNK):
            sizes = self.sizes[start : start + _CHUNK].astype(np.int64)
            pointers = self._pointers[start : start + _CHUNK]
            # Written as a comparison that cannot overflow, whatever a damaged file holds.
            outside = (sizes < 0) | (pointers < 0) | (pointers > bin_bytes - sizes * itemsize)
            outside |= pointers % itemsize != 0
            if outside.any():
                first = int(outside.argmax())
                raise _bad(
                    "indexed-sizes",
                    f"sequence {start + first} ({int(sizes[first])} tokens of {itemsize} bytes at byte "
                    f"{int(pointers[first])}) does not lie in {bin_.name}, which has {bin_bytes} bytes",
                    idx,
                    f"{bin_.name} is truncated or belongs to another index: {_REBUILD}",
                )
            ends = pointers + sizes * itemsize
            contiguous &= int(pointers[0]) == expected and bool((pointers[1:] == ends[:-1]).all())
            expected = int(ends[-1])
            num_tokens += int(sizes.sum())
        documents = self.document_indices
        if len(documents) and (
            int(documents[0]) < 0 or int(documents[-1]) > len(self) or bool((documents[1:] < documents[:-1]).any())
        ):
            raise _bad("indexed-documents", f"document indices do not ascend from 0 to {len(self)}", idx, _REBUILD)
        return num_tokens, contiguous


class StitchedTokens:
    """The sequences of an indexed dataset that do not lie back to back, as one sliceable row of tokens."""

    def __init__(self, dataset: IndexedDataset) -> None:
        self._dataset = dataset
        self._ends = np.cumsum(dataset.sizes, dtype=np.int64)

    def __len__(self) -> int:
        return self._dataset.num_tokens

    def __getitem__(self, key: slice, /) -> npt.NDArray[Any]:
        """Copy of tokens ``start`` up to ``stop`` (step 1)."""
        start, stop, step = key.indices(len(self))
        if step != 1:
            raise ValueError("only slices of step 1")
        pieces = []
        index = int(np.searchsorted(self._ends, start, side="right"))
        while start < stop:
            sequence = self._dataset[index]
            first = start - (int(self._ends[index]) - len(sequence))
            piece = sequence[first : first + stop - start]
            pieces.append(piece)
            start += len(piece)
            index += 1
        return np.concatenate(pieces) if pieces else np.empty(0, self._dataset.dtype)


def _read_header(idx: Path) -> tuple[np.dtype[Any], int, int]:
    """Token type, number of sequences and of document indices; the length of the file agrees with them."""
    size = idx.stat().st_size
    with idx.open("rb") as file:
        head = file.read(HEADER.size)
    if head[: len(MAGIC)] != MAGIC[: len(head)] or not head:
        fix = "name the prefix of a Megatron indexed dataset (made by preprocess_data.py or IndexedDatasetWriter)"
        found = f"starts with {head[:9]!r}, expected {MAGIC!r}" if head else "the file is empty"
        raise _bad("indexed-magic", f"not an indexed dataset: {found}", idx, fix)
    if len(head) < HEADER.size:
        raise _truncated(idx, size, HEADER.size)
    _, version, code, num_sequences, num_indices = HEADER.unpack(head)
    if version != VERSION:
        raise _bad("indexed-version", f"index version {version}, only version {VERSION} is known", idx, _REBUILD)
    if code not in DTYPE_OF_CODE:
        known = ", ".join(f"{code} {dtype.name}" for code, dtype in sorted(DTYPE_OF_CODE.items()))
        raise _bad("indexed-dtype", f"token type code {code} is none of {known}", idx, _REBUILD)
    expected = HEADER.size + 12 * num_sequences + 8 * num_indices
    if size < expected:
        raise _truncated(idx, size, expected)
    if size > expected:
        what = f"{size} bytes, but its header describes {expected}"
        if size == expected + num_sequences:
            what += " (one byte more per sequence: a multimodal dataset, which is not supported)"
        raise _bad("indexed-length", what, idx, _REBUILD)
    return DTYPE_OF_CODE[code], num_sequences, num_indices


def _map(path: Path, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    # A plain array: slicing a memmap object costs microseconds more. It keeps the mapping alive as its base.
    return np.memmap(path, dtype=dtype, mode="r").view(np.ndarray)


def _missing(path: Path, other: Path) -> Problem | None:
    if path.is_file() and os.access(path, os.R_OK):
        return None
    state = "cannot be read" if path.exists() else "does not exist"
    fix = f"put it beside {other.name}: an indexed dataset is two files, prefix.bin and prefix.idx"
    return Problem(code="indexed-missing", what=f"{path.name} {state}", where=str(path), fix=fix)


def _truncated(idx: Path, size: int, expected: int) -> DataError:
    return _bad("indexed-truncated", f"truncated: {size} bytes, at least {expected} expected", idx, _REBUILD)


def _bad(code: str, what: str, path: Path, fix: str) -> DataError:
    return DataError(Problem(code=code, what=what, where=str(path), fix=fix))
