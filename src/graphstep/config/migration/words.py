"""Words of a command, with their places in the text they come from."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

_CONTINUATIONS = re.compile(r"(?:(?<!\\)\\\r?\n)+\Z")
_PLAIN = re.compile(r"[\w@%+=:,./-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Word:
    """One word as a shell reads it."""

    start: int
    """Where it begins."""
    end: int
    """Where it ends."""
    raw: str
    """How it is written, with its quotes."""
    value: str | None
    """What the command gets; ``None`` if only a run can tell, because something in it is expanded."""
    container: int = 0
    """Start of the list it stands in: words of two lists are never next to each other in the text."""

    @property
    def is_option(self) -> bool:
        """Does it look like an option?"""
        return self.value is not None and re.match(r"--|-[A-Za-z]", self.value) is not None

    @property
    def end_of_text(self) -> int:
        """Where it ends, without line continuations right behind it: ``none\\`` at the end of a line."""
        tail = _CONTINUATIONS.search(self.raw)
        return self.end - (len(tail[0]) if tail else 0)

    def written(self, words: Sequence[str]) -> str:
        """Return other words, quoted as this one is."""
        raw = self.raw[: self.end_of_text - self.start]
        quote = raw[0] if len(raw) > 1 and raw[0] == raw[-1] and raw[0] in "\"'" else ""
        if quote:
            return " ".join(f"{quote}{word}{quote}" for word in words)
        return " ".join(word if _PLAIN.fullmatch(word) else shlex.quote(word) for word in words)


@dataclass(frozen=True, slots=True)
class Edit:
    """Replace a piece of a text."""

    start: int
    end: int
    text: str


def apply_edits(text: str, edits: Sequence[Edit]) -> str:
    """Return ``text`` with all edits made. They may not overlap."""
    for edit in sorted(edits, key=lambda edit: edit.start, reverse=True):
        text = text[: edit.start] + edit.text + text[edit.end :]
    return text


def line_of(text: str, position: int) -> int:
    """Return the number of the line that a position stands in, from 1."""
    return text.count("\n", 0, position) + 1


def edits_of(text: str, changed: Sequence[tuple[Word, Sequence[str]]]) -> list[Edit]:
    """Return the edits that write other words in the place of some.

    Args:
        text: what the words come from.
        changed: word, and the words to write instead; none removes it, with its line if nothing else stands there.
    """
    edits = [Edit(word.start, word.end_of_text, word.written(words)) for word, words in changed if words]
    removed: list[tuple[int, int]] = []
    for word in sorted((word for word, words in changed if not words), key=lambda word: word.start):
        if removed and re.fullmatch(r"(?:[ \t]|\\\r?\n)*", text[removed[-1][1] : word.start]):
            removed[-1] = (removed[-1][0], word.end_of_text)
        else:
            removed.append((word.start, word.end_of_text))
    return edits + [Edit(*_with_white_space(text, start, end), "") for start, end in removed]


def _with_white_space(text: str, start: int, end: int) -> tuple[int, int]:
    """Widen the place of removed words by the white space, or the rest of the line, that belongs to them."""
    line_start = text.rfind("\n", 0, start) + 1
    is_first = not text[line_start:start].strip(" \t")
    behind = re.compile(r"[ \t]*(?:\\\r?\n)?").match(text, end)
    after = behind.end() if behind else end
    continues = text[end:after].endswith("\n")
    is_last = continues or after == len(text) or text[after] in "\r\n"
    if is_first and is_last:
        if continues:
            return line_start, after
        before = re.search(r"[ \t]*\\\r?\n\Z", text[:line_start])
        if before:  # the last line of a command: the line above no longer continues
            return before.start(), after
        newline = re.compile(r"\r?\n").match(text, after)
        return line_start, newline.end() if newline else after
    if is_first or text[start - 1] == "(":
        blanks = re.compile(r"[ \t]*").match(text, end)
        return start, blanks.end() if blanks else end
    while start > line_start and text[start - 1] in " \t":
        start -= 1
    return start, end
