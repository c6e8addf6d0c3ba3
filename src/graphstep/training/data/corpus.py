"""Text to train on: files and folders of UTF-8 text, or the Python standard library of this machine.

A corpus is a sorted list of files; each file is one document. Its text is read in pieces of bounded size, so that one
file of many gigabytes needs no more memory than a small one.
"""

from __future__ import annotations

import os
import platform
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphstep.errors import DataError, Problem

PIECE_BYTES = 1 << 20
"""Files above this size are tokenised in pieces that end at a line end."""

STANDARD_LIBRARY_BYTES = 4 << 20
"""About how much of the standard library is taken: a few thousand small batches, tokenised in under three seconds."""

_SKIPPED_FOLDERS = frozenset({"__pycache__", "node_modules"})
_NOT_IN_STANDARD_LIBRARY = frozenset(
    # Not of the library, tests, and tables made by programs (character maps, help texts), which are no prose or code.
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
)


class UnreadableTextError(ValueError):
    """A file cannot be read or is not UTF-8 text; the message says which."""

    code = "data-empty"
    """Code of the problem when there is no other file."""


class BinaryTextError(UnreadableTextError):
    """A file contains NUL bytes, as programs, archives and UTF-16 do."""

    code = "data-binary"


@dataclass(frozen=True, kw_only=True)
class TextCorpus:
    """Files of text in a fixed order, each one document."""

    name: str
    """What the user asked for, for messages."""
    files: tuple[Path, ...]
    """Absolute paths, never empty; files that turn out not to be text are skipped when read."""
    is_file: bool = False
    """The user named one file, so that skipping it would be wrong."""


def text_corpus(paths: Sequence[str | Path]) -> TextCorpus:
    """The files named, and those below the folders named (recursively, sorted by path, hidden names left out).

    Raises:
        DataError: all paths that do not exist, cannot be read, or hold no file.
    """
    files: list[Path] = []
    problems: list[Problem] = []
    for path in paths:
        where, root = f"--data-path {path}", Path(path)
        if root.is_file():
            files.append(root.absolute())
            continue
        if not root.is_dir():
            problems.append(missing_path(path))
            continue
        found = sorted(_walk(root.absolute()), key=lambda file: file.as_posix())
        if not found:
            fix = "name a folder with UTF-8 text files, or leave --data-path out for the Python standard library"
            problems.append(Problem(code="data-empty", what="the folder holds no files", where=where, fix=fix))
        files += found
    if problems:
        raise DataError(problems)
    return TextCorpus(
        name=" ".join(str(path) for path in paths),
        files=tuple(files),
        is_file=len(paths) == 1 and Path(paths[0]).is_file(),
    )


def missing_path(path: str | Path) -> Problem:
    """The problem of a data path behind which nothing is."""
    return Problem(
        code="data-missing",
        what="no such text file, folder, or indexed dataset (prefix.bin and prefix.idx)",
        where=f"--data-path {path}",
        fix="correct the path, or leave --data-path out for the text of the Python standard library",
    )


def standard_library_corpus(*, max_bytes: int = STANDARD_LIBRARY_BYTES) -> TextCorpus:
    """The ``.py`` files of the Python standard library, without installed packages, tests and tables.

    When there is more than ``max_bytes``, a fixed choice of files spread over the library, of about that size. The text
    depends on the Python version.

    Raises:
        DataError: the standard library is not there as files.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    sizes: dict[Path, int] = {}
    for file in _walk(root, skipped=_NOT_IN_STANDARD_LIBRARY) if root.is_dir() else ():
        if file.suffix == ".py" and (size := file.stat().st_size):
            sizes[file] = size
    # A hash of the name spreads the choice evenly over the library and gives the same files on every machine.
    share = max_bytes / max(sum(sizes.values()), 1)
    files = sorted(file for file in sizes if zlib.crc32(file.relative_to(root).as_posix().encode()) < share * 2**32)
    if not files:
        raise DataError(
            Problem(
                code="data-missing",
                what="the Python standard library is not installed as files, so there is no default text",
                where=str(root),
                fix="name your text with --data-path FILE_OR_FOLDER, or use --mock-data",
            )
        )
    return TextCorpus(name=f"Python {platform.python_version()} standard library", files=tuple(files))


def read_pieces(path: Path, *, piece_bytes: int = PIECE_BYTES) -> Iterator[str]:
    """Text of a file, in pieces of about ``piece_bytes`` that end at a line end where there is one; no empty piece.

    A byte-order mark is left out. The fault of a file may show only after some pieces were given.

    Raises:
        UnreadableTextError: the file cannot be read, contains a NUL byte, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            rest, is_first = b"", True
            while block := file.read(piece_bytes):
                if b"\0" in block:
                    raise BinaryTextError("contains NUL bytes (binary?)")
                rest += block
                end = rest.rfind(b"\n") + 1 or _last_character_start(rest)
                if len(block) == piece_bytes and end:
                    yield _decode(rest[:end], is_first)
                    rest, is_first = rest[end:], False
            if text := _decode(rest, is_first):
                yield text
    except OSError as error:
        raise UnreadableTextError(f"cannot be read: {error.strerror or error}") from error


def check_beginning(corpus: TextCorpus) -> None:
    """Look at the first piece of the one file of a corpus.

    Raises:
        DataError: the file is empty, or begins with what is no text.
    """
    code = "data-empty"
    try:
        what = "" if next(read_pieces(corpus.files[0]), "") else "the file is empty"
    except UnreadableTextError as error:
        what, code = f"the file {error}", error.code
    if what:
        fix = "name UTF-8 text (convert other encodings with iconv), or an indexed dataset by its prefix"
        raise DataError(Problem(code=code, what=what, where=f"--data-path {corpus.name}", fix=fix))


def _decode(data: bytes, is_first: bool) -> str:
    try:
        return data.decode("utf-8-sig" if is_first else "utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableTextError(f"is not UTF-8 ({error.reason} at byte {error.start})") from error


def _last_character_start(data: bytes) -> int:
    """Where the last character begins, which may be cut off; characters have at most four bytes."""
    end = len(data) - 1
    while end > 0 and len(data) - end < 4 and data[end] & 0xC0 == 0x80:
        end -= 1
    return end


def _walk(root: Path, skipped: frozenset[str] = _SKIPPED_FOLDERS) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in skipped and not name.startswith("."))
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield path
