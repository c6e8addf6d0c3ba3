"""Tokens of a corpus, made once and kept as a memory-mapped file in the cache folder.

The file is named by a hash of everything that decides its content: format version, tokenizer, and path, size and
modification time of every source file. It is written under a temporary name and renamed, so that a reader sees a whole
file or none; processes that want the same file at once wait for the first one. Layout: the header below, then the
tokens, each document followed by the end-of-document token if asked for.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import itertools
import json
import os
import secrets
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from graphstep.cache_folder import default_cache_folder
from graphstep.errors import DataError, Problem
from graphstep.training.data.corpus import TextCorpus, UnreadableTextError, read_pieces
from graphstep.training.data.tokenizers import Tokenizer

FORMAT_VERSION = 1
_MAGIC = b"GSTOKENS"
_HEADER = struct.Struct("<8sIIQQQQ32s")
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
_BATCH_CHARACTERS = 4 << 20
_BATCH_PIECES = 16


@dataclass(frozen=True, kw_only=True)
class TokenStore:
    """All tokens of a corpus in a row."""

    tokens: npt.NDArray[Any]
    """[number of tokens] uint16 or int32, read-only; memory-mapped unless :attr:`path` is None."""
    num_documents: int
    path: Path | None
    """The cache file, None when the tokens are only in memory."""
    was_cached: bool
    """False when the tokens were made by this call."""
    notices: tuple[str, ...]
    """What the user should know: files skipped, cache not writable, cache file damaged."""


@dataclass(frozen=True)
class _Job:
    """What decides the tokens."""

    corpus: TextCorpus
    tokenizer: Tokenizer
    append_eod: bool

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("<u2" if self.tokenizer.vocab_size <= 1 << 16 else "<i4")

    def key(self) -> bytes:
        """Hash of everything that decides the tokens: 32 bytes."""
        files: list[tuple[str, int, int]] = []
        for path in self.corpus.files:
            try:
                stat = path.stat()
                files.append((str(path), stat.st_size, stat.st_mtime_ns))
            except OSError:
                files.append((str(path), -1, -1))
        tokenizer = self.tokenizer
        # ASCII with escapes: names that are no UTF-8 hold lone surrogates, which cannot be encoded otherwise.
        content = json.dumps([FORMAT_VERSION, tokenizer.identity, tokenizer.vocab_size, self.append_eod, files])
        return hashlib.sha256(content.encode("ascii")).digest()


@dataclass(frozen=True)
class _Counts:
    num_tokens: int
    num_documents: int
    num_skipped: int
    first_skipped: int


def open_token_store(
    corpus: TextCorpus, tokenizer: Tokenizer, *, append_eod: bool = True, cache_folder: Path | None = None
) -> TokenStore:
    """Tokens of ``corpus``, from the cache file or made now.

    Args:
        corpus: files of text.
        tokenizer: ids below its ``vocab_size`` are stored as uint16 where they fit, else int32.
        append_eod: put the end-of-document token behind each document.
        cache_folder: made if missing. None takes the default folder, and when that one cannot be written the tokens
            are made in memory, with a notice.

    Raises:
        DataError: no file of the corpus is text, all are empty, or the ``cache_folder`` given cannot be written.
    """
    job = _Job(corpus, tokenizer, append_eod)
    folder = cache_folder or default_cache_folder(os.environ)
    if folder is None:
        return _in_memory(job, "there is no home folder for a cache")
    try:
        return _in_folder(job, folder)
    except OSError as error:
        reason = f"{folder} cannot be written ({error.strerror or error})"
        if cache_folder is None:
            return _in_memory(job, f"the cache folder {reason}")
        raise DataError(
            Problem(
                code="data-cache",
                what=f"the cache folder {reason}",
                where=f"--data-cache-path {cache_folder}",
                fix="name a folder that can be written and has room, or leave --data-cache-path out",
            )
        ) from error


def _in_folder(job: _Job, folder: Path) -> TokenStore:
    key = job.key()
    path = folder / f"{key.hex()[:32]}.tokens"
    if store := _open_cached(path, key, job):
        return store
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_suffix(".lock")) as is_locked:
        if store := _open_cached(path, key, job):
            return store
        notices = []
        if path.exists():
            notices.append(f"the cache file {path} was damaged and has been made again")
        if is_locked:  # nobody else writes this file: what lies here was left by a process that was killed
            for leftover in folder.glob(f"{path.stem}.*.tmp"):
                leftover.unlink(missing_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}-{secrets.token_hex(4)}.tmp")
        try:
            with temporary.open("xb") as file:
                file.write(bytes(HEADER_BYTES))
                counts = _tokenise(job, file)
                file.seek(0)
                file.write(_pack_header(key, job.dtype, counts))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        store = _open_cached(path, key, job)
    if store is None:
        raise OSError(f"{path.name} is damaged right after writing")
    return TokenStore(
        tokens=store.tokens,
        num_documents=store.num_documents,
        path=path,
        was_cached=False,
        notices=(*notices, *store.notices),
    )


def _in_memory(job: _Job, reason: str) -> TokenStore:
    file = io.BytesIO()
    counts = _tokenise(job, file)
    tokens = np.frombuffer(file.getvalue(), dtype=job.dtype)
    return TokenStore(
        tokens=tokens,
        num_documents=counts.num_documents,
        path=None,
        was_cached=False,
        notices=(f"{reason}: the text is tokenised in memory, at each start", *_skip_notices(job.corpus, counts)),
    )


def _tokenise(job: _Job, file: BinaryIO) -> _Counts:
    """Append all documents to ``file``; raises OSError only for ``file``, never for a source."""
    dtype, start = job.dtype, file.tell()
    eod = np.array([job.tokenizer.eod], dtype=dtype).tobytes() if job.append_eod else b""
    waiting: list[str] = []  # whole short documents: a batch of them is tokenised on all cores
    num_waiting_characters, num_documents = 0, 0
    skipped: list[int] = []
    reason: UnreadableTextError | None = None  # of the first file that was skipped

    def write(texts: list[str], end: bytes) -> None:
        for tokens in job.tokenizer.encode_batch(texts):
            file.write(tokens.astype(dtype).tobytes() + end)

    for index, path in enumerate(job.corpus.files):
        mark: int | None = None
        try:
            pieces: Iterator[str] = read_pieces(path)
            first, second = next(pieces, ""), next(pieces, "")
            if first and not second:
                waiting.append(first)
                num_waiting_characters += len(first)
            if second or num_waiting_characters > _BATCH_CHARACTERS:
                write(waiting, eod)
                waiting, num_waiting_characters = [], 0
            if second:
                mark = file.tell()
                pieces = itertools.chain((first, second), pieces)
                while group := list(itertools.islice(pieces, _BATCH_PIECES)):
                    write(group, b"")
                file.write(eod)
            num_documents += bool(first)
        except UnreadableTextError as error:
            reason = reason or error
            skipped.append(index)
            if mark is not None:
                file.seek(mark)
                file.truncate()
    write(waiting, eod)
    counts = _Counts(
        num_tokens=(file.tell() - start) // dtype.itemsize,
        num_documents=num_documents,
        num_skipped=len(skipped),
        first_skipped=skipped[0] if skipped else 0,
    )
    if not num_documents:
        raise _nothing_left(job.corpus, counts, reason)
    return counts


def _nothing_left(corpus: TextCorpus, counts: _Counts, reason: UnreadableTextError | None) -> DataError:
    code = "data-empty"
    if not counts.num_skipped:
        what = "the file is empty" if corpus.is_file else f"all {len(corpus.files)} files are empty"
    elif corpus.is_file:
        what = f"the file {reason}"
        code = reason.code if reason is not None else code
    else:
        what = (
            f"none of the {len(corpus.files)} files is UTF-8 text "
            f"(the first, {corpus.files[counts.first_skipped]}, {reason})"
        )
    return DataError(
        Problem(
            code=code,
            what=what,
            where=f"--data-path {corpus.name}",
            fix="name UTF-8 text (convert other encodings with iconv), or an indexed dataset by its prefix",
        )
    )


def _skip_notices(corpus: TextCorpus, counts: _Counts) -> tuple[str, ...]:
    if not counts.num_skipped:
        return ()
    first = corpus.files[counts.first_skipped]
    return (
        f"skipped {counts.num_skipped} of {len(corpus.files)} files that are not readable UTF-8 text (first: {first})",
    )


def _pack_header(key: bytes, dtype: np.dtype[Any], counts: _Counts) -> bytes:
    header = _HEADER.pack(
        _MAGIC,
        FORMAT_VERSION,
        dtype.itemsize,
        counts.num_tokens,
        counts.num_documents,
        counts.num_skipped,
        counts.first_skipped,
        key,
    )
    return header + _CHECKSUM.pack(zlib.crc32(header))


def _open_cached(path: Path, key: bytes, job: _Job) -> TokenStore | None:
    """The store in a whole cache file of this key; None when it is missing, unreadable or damaged."""
    dtype = job.dtype
    try:
        with path.open("rb") as file:
            header = file.read(HEADER_BYTES)
            if (
                len(header) < HEADER_BYTES
                or zlib.crc32(header[: _HEADER.size]) != _CHECKSUM.unpack_from(header, _HEADER.size)[0]
            ):
                return None
            magic, version, itemsize, num_tokens, num_documents, num_skipped, first_skipped, found = _HEADER.unpack(
                header[: _HEADER.size]
            )
            if (magic, version, itemsize, found) != (_MAGIC, FORMAT_VERSION, dtype.itemsize, key):
                return None
            if os.fstat(file.fileno()).st_size != HEADER_BYTES + num_tokens * itemsize:
                return None
            mapped = np.memmap(file, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(num_tokens,))
    except OSError:
        return None
    counts = _Counts(num_tokens, num_documents, num_skipped, first_skipped)
    return TokenStore(
        tokens=mapped.view(np.ndarray),
        num_documents=num_documents,
        path=path,
        was_cached=True,
        notices=_skip_notices(job.corpus, counts),
    )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock file; False where the file system has no locks, where each process makes its own file then."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            is_locked = True
        except OSError:
            is_locked = False
        yield is_locked  # closing the file frees the lock, also when the process is killed
