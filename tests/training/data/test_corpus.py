from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstep.errors import DataError
from graphstep.training.data.corpus import (
    STANDARD_LIBRARY_BYTES,
    UnreadableTextError,
    read_pieces,
    standard_library_corpus,
    text_corpus,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\ufeff"), max_size=40)


@given(TEXT, st.integers(1, 12))
def test_pieces_are_the_text(text: str, piece_bytes: int) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "text")
        path.write_bytes(text.encode())
        pieces = list(read_pieces(path, piece_bytes=piece_bytes))
    assert "".join(pieces) == text
    assert all(pieces)


@given(st.binary(max_size=30), st.integers(1, 12))
def test_pieces_of_any_bytes(data: bytes, piece_bytes: int) -> None:
    try:
        text = None if b"\0" in data else data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = None
    with TemporaryDirectory() as folder:
        path = Path(folder, "text")
        path.write_bytes(data)
        if text is None:
            with pytest.raises(UnreadableTextError):
                list(read_pieces(path, piece_bytes=piece_bytes))
        else:
            assert "".join(read_pieces(path, piece_bytes=piece_bytes)) == text


def test_pieces_end_at_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\xef\xbb\xbfone\ntwo\nthree\n")
    assert list(read_pieces(path, piece_bytes=9)) == ["one\n", "two\nthree\n"]
    with pytest.raises(UnreadableTextError, match="cannot be read"):
        list(read_pieces(tmp_path / "none"))


def test_folder_is_sorted_and_recursive(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/.hidden", ".git/config", "__pycache__/x.py", "a/b/c.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    corpus = text_corpus([tmp_path])
    assert [path.relative_to(tmp_path).as_posix() for path in corpus.files] == ["a/b/c.txt", "a/z.md", "b.txt"]
    assert not corpus.is_file
    both = text_corpus([tmp_path / "b.txt", tmp_path / "a"])
    assert [path.name for path in both.files] == ["b.txt", "c.txt", "z.md"]


def test_missing_and_empty_paths_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError) as caught:
        text_corpus([tmp_path / "none", tmp_path / "empty"])
    assert [problem.code for problem in caught.value.problems] == ["data-missing", "data-empty"]


def test_standard_library() -> None:
    corpus = standard_library_corpus()
    assert list(corpus.files) == sorted(corpus.files)
    assert all(path.suffix == ".py" for path in corpus.files)
    assert not any({"site-packages", "test", "tests"} & set(path.parts) for path in corpus.files)
    size = sum(path.stat().st_size for path in corpus.files)
    assert STANDARD_LIBRARY_BYTES / 4 < size < 1.3 * STANDARD_LIBRARY_BYTES
    smaller = standard_library_corpus(max_bytes=STANDARD_LIBRARY_BYTES // 8)
    assert set(smaller.files) < set(corpus.files)


def test_no_standard_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path / "none")})
    with pytest.raises(DataError, match="--data-path"):
        standard_library_corpus()
