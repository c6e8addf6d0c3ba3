from __future__ import annotations

import dataclasses
import errno
import multiprocessing
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from graphstep.cache_folder import default_cache_folder
from graphstep.errors import DataError
from graphstep.training.data import ByteTokenizer, HuggingFaceTokenizer
from graphstep.training.data.corpus import read_pieces, text_corpus
from graphstep.training.data.token_store import HEADER_BYTES, open_token_store


class CountingTokenizer(ByteTokenizer):
    """Counts batches, and takes its time when asked to."""

    def __init__(self, *, vocab_size: int = 257, seconds: float = 0.0) -> None:
        self.vocab_size = vocab_size
        self.num_batches = 0
        self.seconds = seconds

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        self.num_batches += 1
        time.sleep(self.seconds)
        return super().encode_batch(texts)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("one")
    (folder / "b.txt").write_text("zwei ü")
    (folder / "c.txt").write_text("")
    return folder


def expected(*documents: str) -> list[int]:
    return [token for document in documents for token in (*document.encode(), 256)]


def files_in(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir())


def test_made_once_then_found(tmp_path: Path, texts: Path) -> None:
    cache, tokenizer, corpus = tmp_path / "new" / "cache", CountingTokenizer(), text_corpus([texts])
    first = open_token_store(corpus, tokenizer, cache_folder=cache)
    num_batches = tokenizer.num_batches
    second = open_token_store(corpus, tokenizer, cache_folder=cache)
    assert (first.was_cached, second.was_cached) == (False, True)
    assert tokenizer.num_batches == num_batches
    assert first.tokens.tolist() == second.tokens.tolist() == expected("one", "zwei ü")
    assert (first.num_documents, second.num_documents) == (2, 2)
    assert second.tokens.dtype == np.uint16
    assert not second.tokens.flags.owndata
    assert not second.tokens.flags.writeable
    assert second.path == first.path
    assert second.path is not None
    assert second.path.stat().st_size == HEADER_BYTES + 2 * len(second.tokens)
    assert files_in(cache) == [".lock", ".tokens"]


def test_without_eod(tmp_path: Path, texts: Path) -> None:
    corpus = text_corpus([texts])
    store = open_token_store(corpus, ByteTokenizer(), append_eod=False, cache_folder=tmp_path)
    assert store.tokens.tolist() == list("onezwei ü".encode())
    assert not open_token_store(corpus, ByteTokenizer(), cache_folder=tmp_path).was_cached


def test_large_vocabulary_needs_more_bytes(tmp_path: Path, texts: Path) -> None:
    corpus = text_corpus([texts])
    assert open_token_store(corpus, CountingTokenizer(vocab_size=1 << 16), cache_folder=tmp_path).tokens.itemsize == 2
    assert (
        open_token_store(corpus, CountingTokenizer(vocab_size=1 + (1 << 16)), cache_folder=tmp_path).tokens.dtype
        == np.int32
    )


def test_huggingface_tokens(tmp_path: Path, texts: Path, huggingface_tokenizer: HuggingFaceTokenizer) -> None:
    store = open_token_store(text_corpus([texts]), huggingface_tokenizer, cache_folder=tmp_path)
    documents = [*huggingface_tokenizer.encode("one").tolist(), 0, *huggingface_tokenizer.encode("zwei ü").tolist(), 0]
    assert store.tokens.tolist() == documents
    other = open_token_store(text_corpus([texts]), ByteTokenizer(), cache_folder=tmp_path)
    assert not other.was_cached
    assert other.path != store.path


@pytest.mark.parametrize("change", ["content", "time", "file", "name"])
def test_changed_sources_are_read_again(tmp_path: Path, texts: Path, change: str) -> None:
    open_token_store(text_corpus([texts]), ByteTokenizer(), cache_folder=tmp_path)
    path = texts / "a.txt"
    if change == "content":
        path.write_text("other")
    elif change == "time":
        os.utime(path, ns=(0, 1))
    elif change == "file":
        (texts / "d.txt").write_text("more")
    else:
        path.rename(texts / "e.txt")
    assert not open_token_store(text_corpus([texts]), ByteTokenizer(), cache_folder=tmp_path).was_cached
    assert open_token_store(text_corpus([texts]), ByteTokenizer(), cache_folder=tmp_path).was_cached


def test_every_truncation_is_rebuilt(tmp_path: Path, texts: Path) -> None:
    corpus, cache = text_corpus([texts]), tmp_path / "cache"
    path = open_token_store(corpus, ByteTokenizer(), cache_folder=cache).path
    assert path is not None
    whole = path.read_bytes()
    for length in (*range(0, len(whole), 5), len(whole) - 1):
        path.write_bytes(whole[:length])
        store = open_token_store(corpus, ByteTokenizer(), cache_folder=cache)
        assert not store.was_cached
        assert "was damaged and has been made again" in store.notices[0]
        assert path.read_bytes() == whole


def test_damaged_header_and_extra_bytes_are_rebuilt(tmp_path: Path, texts: Path) -> None:
    corpus, cache = text_corpus([texts]), tmp_path / "cache"
    path = open_token_store(corpus, ByteTokenizer(), cache_folder=cache).path
    assert path is not None
    whole = path.read_bytes()
    for position in range(HEADER_BYTES):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        assert not open_token_store(corpus, ByteTokenizer(), cache_folder=cache).was_cached
        assert path.read_bytes() == whole
    path.write_bytes(whole + b"\0\0")
    assert not open_token_store(corpus, ByteTokenizer(), cache_folder=cache).was_cached
    assert open_token_store(corpus, ByteTokenizer(), cache_folder=cache).was_cached


def test_other_files_are_skipped_and_counted(tmp_path: Path, texts: Path) -> None:
    (texts / "aa.bin").write_bytes(b"a\0b")
    (texts / "bb.txt").write_bytes("ü".encode("latin-1"))
    for _ in range(2):  # made, then found
        store = open_token_store(text_corpus([texts]), ByteTokenizer(), cache_folder=tmp_path)
        assert store.tokens.tolist() == expected("one", "zwei ü")
        (notice,) = store.notices
        assert notice.startswith("skipped 2 of 5 files")
        assert "aa.bin" in notice


def test_large_file_comes_in_pieces(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (texts / "aa.txt").write_text("first\nsecond\n")
    (texts / "b.bad").write_bytes(b"good\ngood\ngood\n\xff\n")
    monkeypatch.setattr(
        "graphstep.training.data.token_store.read_pieces", lambda path: read_pieces(path, piece_bytes=6)
    )
    store = open_token_store(text_corpus([texts]), ByteTokenizer(), cache_folder=tmp_path)
    assert store.tokens.tolist() == expected("one", "first\nsecond\n", "zwei ü")
    assert store.num_documents == 3


@pytest.mark.parametrize(
    ("content", "message", "code"),
    [
        (b"", "the file is empty", "data-empty"),
        (b"a\0", r"the file contains NUL bytes \(binary\?\)", "data-binary"),
        (b"ab\xff", "is not UTF-8 .* at byte 2", "data-empty"),
    ],
)
def test_one_file_without_text(tmp_path: Path, content: bytes, message: str, code: str) -> None:
    path, cache = tmp_path / "text", tmp_path / "cache"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        open_token_store(text_corpus([path]), ByteTokenizer(), cache_folder=cache)
    assert str(path) in caught.value.problems[0].where
    assert caught.value.problems[0].code == code
    assert files_in(cache) == [".lock"]


def test_folder_without_text(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a").write_bytes(b"")
    with pytest.raises(DataError, match="all 1 files are empty"):
        open_token_store(text_corpus([folder]), ByteTokenizer(), cache_folder=tmp_path)
    (folder / "b").write_bytes(b"\0")
    with pytest.raises(DataError, match=r"none of the 2 files is UTF-8 text .*b, contains NUL bytes"):
        open_token_store(text_corpus([folder]), ByteTokenizer(), cache_folder=tmp_path)


def test_file_that_vanished_is_skipped(tmp_path: Path, texts: Path) -> None:
    corpus = text_corpus([texts])
    (texts / "a.txt").unlink()
    store = open_token_store(corpus, ByteTokenizer(), cache_folder=tmp_path)
    assert store.tokens.tolist() == expected("zwei ü")
    assert "skipped 1 of 3" in store.notices[0]


def test_named_cache_folder_that_cannot_be_written(tmp_path: Path, texts: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="--data-cache-path"):
        open_token_store(text_corpus([texts]), ByteTokenizer(), cache_folder=tmp_path / "file" / "cache")


def test_default_cache_folder_that_cannot_be_written(
    tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    corpus = text_corpus([texts])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    store = open_token_store(corpus, ByteTokenizer())
    assert store.tokens.tolist() == expected("one", "zwei ü")
    assert not store.tokens.flags.writeable
    assert store.path is None
    assert "in memory" in store.notices[0]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert open_token_store(corpus, ByteTokenizer()).path is not None
    assert files_in(tmp_path / "xdg" / "graphstep") == [".lock", ".tokens"]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME")
    assert "no home folder" in open_token_store(corpus, ByteTokenizer()).notices[0]


def test_default_cache_folder_follows_xdg() -> None:
    assert default_cache_folder({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/graphstep")
    assert default_cache_folder({"XDG_CACHE_HOME": "x", "HOME": "/h"}) == Path("/h/.cache/graphstep")
    assert default_cache_folder({}) is None


def test_full_disk_leaves_nothing(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    cache = tmp_path / "cache"
    with pytest.raises(DataError, match="No space left"):
        open_token_store(text_corpus([texts]), ByteTokenizer(), cache_folder=cache)
    assert files_in(cache) == [".lock"]


def test_leftover_of_a_killed_process_is_removed(tmp_path: Path, texts: Path) -> None:
    corpus, cache = text_corpus([texts]), tmp_path / "cache"
    path = open_token_store(corpus, ByteTokenizer(), cache_folder=cache).path
    assert path is not None
    path.unlink()
    path.with_suffix(".1-0.tmp").write_bytes(b"x")
    (cache / "other.1-0.tmp").write_bytes(b"x")
    open_token_store(corpus, ByteTokenizer(), cache_folder=cache)
    assert sorted(file.name for file in cache.glob("*.tmp")) == ["other.1-0.tmp"]


def test_without_file_locks(tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(file: object, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", unsupported)
    store = open_token_store(text_corpus([texts]), ByteTokenizer(), cache_folder=tmp_path / "cache")
    assert store.tokens.tolist() == expected("one", "zwei ü")


def build_in_child(texts: Path, cache: Path, barrier: Any, results: Any) -> None:
    tokenizer = CountingTokenizer(seconds=0.05)
    corpus = text_corpus([texts])
    barrier.wait()
    store = open_token_store(corpus, tokenizer, cache_folder=cache)
    results.put((store.was_cached, tokenizer.num_batches, store.tokens.tolist()))


def test_processes_at_once_make_it_once(tmp_path: Path, texts: Path) -> None:
    # fork: the children need no import of torch again; they run no torch.
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    cache = tmp_path / "cache"
    children = [context.Process(target=build_in_child, args=(texts, cache, barrier, results)) for _ in range(3)]
    for child in children:
        child.start()
    found = [results.get(timeout=30) for _ in children]
    for child in children:
        child.join(timeout=30)
        assert child.exitcode == 0
    assert [tokens for _, _, tokens in found] == [expected("one", "zwei ü")] * 3
    assert sorted((was_cached, batches > 0) for was_cached, batches, _ in found) == [
        (False, True),
        (True, False),
        (True, False),
    ]
    assert files_in(cache) == [".lock", ".tokens"]


def test_open_store_outlives_its_file(tmp_path: Path, texts: Path) -> None:
    corpus = text_corpus([texts])
    store = open_token_store(corpus, ByteTokenizer(), cache_folder=tmp_path)
    assert store.path is not None
    store.path.unlink()
    open_token_store(corpus, ByteTokenizer(), cache_folder=tmp_path)
    assert store.tokens.tolist() == expected("one", "zwei ü")
    with pytest.raises(dataclasses.FrozenInstanceError):
        store.path = None  # type: ignore[misc]
