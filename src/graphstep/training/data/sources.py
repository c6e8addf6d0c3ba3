"""What ``--data-path`` names: text, indexed datasets, and the weights between them.

The words are either paths, or weights and paths in turn (``0.3 prefixA 0.7 prefixB``). A path whose ``.idx`` or
``.bin`` exists is an indexed dataset, any other existing path is text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphstep.errors import DataError, Problem
from graphstep.training.data.corpus import missing_path
from graphstep.training.data.indexed import data_path, index_path


@dataclass(frozen=True, kw_only=True)
class Source:
    """One data set of the blend."""

    paths: tuple[str, ...]
    """Files and folders of text, which form one corpus, or the one prefix of an indexed dataset."""
    is_indexed: bool
    weight: float | None
    """Share of the samples; None: every sample of every source once an epoch."""

    @property
    def name(self) -> str:
        """The words of the user."""
        return " ".join(self.paths)


def parse_data_path(words: Sequence[str]) -> tuple[Source, ...]:
    """The sources that ``--data-path`` names.

    Words are read as weights and paths in turn when their number is even and the first, third, ... are all numbers; a
    path that looks like a number is written ``./7``. Without weights, all text forms one corpus.

    Raises:
        DataError: nothing named, paths that do not exist, weights that are missing or not positive: all at once.
    """
    sources, problems = read_data_path(words)
    if problems:
        raise DataError(problems)
    return sources


def read_data_path(words: Sequence[str]) -> tuple[tuple[Source, ...], list[Problem]]:
    """Do what :func:`parse_data_path` does; returns the sources that are there, and all problems with the others."""
    if not words:
        fix = "name text files, folders or prefixes, or leave --data-path out for the Python standard library"
        return (), [Problem(code="data-missing", what="no path named", where="--data-path", fix=fix)]
    weights = [_number(word) for word in words]
    if len(words) % 2 == 0 and all(weight is not None for weight in weights[::2]):
        return _weighted(words[1::2], [weight or 0.0 for weight in weights[::2]])
    problems: list[Problem] = []
    prefixes = []
    text: list[str] = []
    for word, weight in zip(words, weights, strict=True):
        prefix, is_text = _found(word, problems)
        if prefix is not None:
            prefixes.append(prefix)
        elif is_text is None:
            continue
        elif is_text:
            text.append(word)
        elif weight is not None:
            fix = "give each path one weight before it (0.3 prefixA 0.7 prefixB), or no path a weight"
            what = f"{word!r} is a weight, but the words are not weights and paths in turn"
            problems.append(Problem(code="data-blend", what=what, where=f"--data-path {' '.join(words)}", fix=fix))
        else:
            problems.append(missing_path(word))
    sources = [Source(paths=(prefix,), is_indexed=True, weight=None) for prefix in prefixes]
    if text:
        sources.append(Source(paths=tuple(text), is_indexed=False, weight=None))
    return tuple(sources), problems


def _weighted(paths: Sequence[str], weights: Sequence[float]) -> tuple[tuple[Source, ...], list[Problem]]:
    problems: list[Problem] = []
    sources = []
    for path, weight in zip(paths, weights, strict=True):
        prefix, is_text = _found(path, problems)
        if prefix is None and is_text is False:
            problems.append(missing_path(path))
        if not (weight > 0 and math.isfinite(weight)):
            fix = "use a finite weight above 0, or leave the path out"
            what = f"weight {weight:g} is not positive"
            problems.append(Problem(code="data-blend", what=what, where=f"--data-path {weight:g} {path}", fix=fix))
        if prefix is not None or is_text:
            sources.append(Source(paths=(prefix or path,), is_indexed=prefix is not None, weight=weight))
    return tuple(sources), problems


def _found(word: str, problems: list[Problem]) -> tuple[str | None, bool | None]:
    """The prefix of an indexed dataset, if any, and whether there is a path; None after adding a problem."""
    try:
        prefix = _indexed_prefix(word)
        return prefix, prefix is None and Path(word).exists()
    except OSError as error:
        what = f"the path cannot be looked at: {error.strerror or error}"
        fix = "name data in a folder that you may read"
        problems.append(Problem(code="data-missing", what=what, where=f"--data-path {word}", fix=fix))
        return None, None


def _indexed_prefix(word: str) -> str | None:
    """The prefix if ``word`` names an indexed dataset, by its prefix or by one of its two files."""
    if index_path(word).exists() or (data_path(word).exists() and not Path(word).exists()):
        return word
    path = Path(word)
    if path.suffix == ".idx" and path.exists():
        return word.removesuffix(".idx")
    if path.suffix == ".bin" and path.exists() and path.with_suffix(".idx").exists():
        return word.removesuffix(".bin")
    return None


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
