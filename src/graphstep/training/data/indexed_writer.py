"""Writer of the Megatron indexed dataset, for tests and for users who have tokens already."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from graphstep.errors import DataError, Problem
from graphstep.training.data.indexed import DTYPE_OF_CODE, HEADER, MAGIC, VERSION, data_path, index_path


class IndexedDatasetWriter:
    """Write ``prefix.bin`` and ``prefix.idx``; both appear complete, under their names, on :meth:`finish`.

    As a context manager it finishes at the end of the block, or leaves nothing behind if the block raised::

        with IndexedDatasetWriter("corpus", dtype=np.uint16) as writer:
            writer.add_document(tokenizer.encode(text))

    Args:
        prefix: path without ``.bin`` and ``.idx``; its folder exists.
        dtype: token type: uint8, int8, int16, int32, int64 or uint16.

    Raises:
        DataError: the token type has no code in the format.
    """

    def __init__(self, prefix: str | Path, *, dtype: npt.DTypeLike = np.uint16) -> None:
        codes = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
        self._dtype = np.dtype(dtype).newbyteorder("<")
        if self._dtype not in codes:
            names = ", ".join(sorted(dtype.name for dtype in codes))
            raise DataError(
                Problem(
                    code="indexed-dtype",
                    what=f"the format has no token type {self._dtype.name}",
                    where="IndexedDatasetWriter(dtype=...)",
                    fix=f"use one of {names}",
                )
            )
        self._code = codes[self._dtype]
        self._bin, self._idx = data_path(prefix), index_path(prefix)
        self._bin_part, self._idx_part = (
            path.with_name(f"{path.name}.{os.getpid()}.tmp") for path in (self._bin, self._idx)
        )
        self._sizes: list[int] = []
        self._documents: list[int] = [0]
        self._is_open = True
        self._file = self._bin_part.open("wb")

    def add_sequence(self, tokens: npt.ArrayLike) -> None:
        """Append one sequence to the current document.

        Raises:
            DataError: the tokens are not one row of integers that the token type holds; nothing was written.
        """
        array: npt.NDArray[Any] = np.asarray(tokens)
        if array.size == 0:
            array = array.astype(self._dtype)
        limits = np.iinfo(self._dtype)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            self._refuse(f"one row of integers expected, got shape {array.shape} of {array.dtype.name}")
        if array.size and (int(array.min()) < limits.min or int(array.max()) > limits.max):
            self._refuse(
                f"tokens from {int(array.min())} to {int(array.max())} do not fit {self._dtype.name} "
                f"({limits.min} to {limits.max})"
            )
        if array.size > np.iinfo(np.int32).max:
            self._refuse(f"a sequence has at most {np.iinfo(np.int32).max} tokens, got {array.size}")
        self._file.write(np.ascontiguousarray(array, dtype=self._dtype).data)
        self._sizes.append(array.size)

    def end_document(self) -> None:
        """End the current document: sequences added from now on belong to the next one."""
        self._documents.append(len(self._sizes))

    def add_document(self, tokens: npt.ArrayLike) -> None:
        """Append a document of one sequence."""
        self.add_sequence(tokens)
        self.end_document()

    def finish(self) -> None:
        """Write the index and give both files their names; a document begun is ended. May be called twice."""
        if not self._is_open:
            return
        if self._documents[-1] != len(self._sizes):
            self.end_document()
        self._is_open = False
        self._file.close()
        try:
            self._write_index()
            # The old index goes first and the new one comes last: where an index exists, its tokens do.
            self._idx.unlink(missing_ok=True)
            self._bin_part.replace(self._bin)
            self._idx_part.replace(self._idx)
        finally:
            self._bin_part.unlink(missing_ok=True)
            self._idx_part.unlink(missing_ok=True)

    def abort(self) -> None:
        """Drop what was written. May be called twice, and after :meth:`finish` does nothing."""
        if self._is_open:
            self._is_open = False
            self._file.close()
            self._bin_part.unlink(missing_ok=True)

    def _write_index(self) -> None:
        sizes = np.array(self._sizes, dtype="<i4")
        lengths = sizes.astype("<i8") * self._dtype.itemsize
        with self._idx_part.open("wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._code, len(sizes), len(self._documents)))
            file.write(sizes.tobytes())
            file.write((np.cumsum(lengths) - lengths).astype("<i8").tobytes())
            file.write(np.array(self._documents, dtype="<i8").tobytes())

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.abort()

    def _refuse(self, what: str) -> None:
        raise DataError(
            Problem(
                code="indexed-tokens",
                what=what,
                where=f"{self._bin}, sequence {len(self._sizes)}",
                fix="write rows of token ids, with a dtype that holds the highest id",
            )
        )
