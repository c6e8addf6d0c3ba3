"""Read a command line by the table of options.

``argparse`` stops at the first thing it cannot read. This reads to the end and reports everything, by the same
conventions: ``--option value`` or ``--option=value``, no abbreviations, the last of several counts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from graphstep.config.migrations import OLD_MODULES, REMOVED
from graphstep.config.options import OPTIONS, Option
from graphstep.config.options.option import text
from graphstep.config.suggest import suggestion
from graphstep.config.validation import Notice
from graphstep.config.words import shown, word_of
from graphstep.errors import Problem

_LOOKS_LIKE_OPTION = re.compile(r"--|-[A-Za-z]")
_MODULES = ("cuda_graph_modules", "cuda_graph_scope")
_HELP_HINT = "graphstep train --help lists the options"


@dataclass(kw_only=True, slots=True)
class Reading:
    """What a command line says."""

    values: dict[str, Any] = field(default_factory=dict)
    """Values that are given, by name."""
    wrong: set[str] = field(default_factory=set)
    """Names of options that are given and cannot be read."""
    problems: list[Problem] = field(default_factory=list)
    """Everything that cannot be read."""
    notices: list[Notice] = field(default_factory=list)
    """Values that a later one replaces."""


@dataclass(kw_only=True, slots=True)
class _Chunk:
    """A spelling, and the words up to the next one."""

    spelling: str
    attached: str | None = None
    words: list[str] = field(default_factory=list)

    @property
    def first(self) -> str:
        """The word it begins with."""
        return self.spelling if self.attached is None else f"{self.spelling}={self.attached}"


def read_options(argv: Sequence[str], options: Sequence[Option] = OPTIONS, *, help_hint: str = _HELP_HINT) -> Reading:
    """Read the words of a command line.

    Args:
        argv: words, without the name of the program and of the command; numbers and paths count as words.
        options: the options there are.
        help_hint: what to do about an option that resembles none of them.

    Returns:
        Values and problems; never raises for what a user can type.
    """
    table = {spelling: option for option in options for spelling in option.spellings}
    reading = Reading()
    chunks = list(_chunks(_words_of(argv, reading)))
    dashed = ""
    for chunk, following in zip_longest(chunks, chunks[1:]):
        # A word with two dashes is rather an option with a typing error: that is said as well.
        is_told = bool(dashed) and not dashed.startswith("--")
        dashed = ""
        option = table.get(chunk.spelling)
        if option is not None:
            if following is not None and following.spelling not in table and _lacks_text(option, chunk):
                dashed = following.first
            _read_option(option, chunk, reading, dashed)
        elif is_told:
            continue
        elif chunk.spelling:
            what = f"there is no option {chunk.spelling}"
            fix = REMOVED.get(chunk.spelling) or suggestion(chunk.spelling, table, help_hint)
            reading.problems.append(Problem("unknown-option", what, chunk.spelling, fix))
        else:
            _refuse_words(chunk.words, "before the first option", "", reading)
    return reading


def _words_of(argv: object, reading: Reading) -> list[str]:
    if isinstance(argv, str | bytes) or not isinstance(argv, Iterable):
        fix = "give a list such as ['--lr', '1e-4']; shlex.split makes one from a line"
        what = f"a command line is a list of words, not {shown(argv)}"
        reading.problems.append(Problem("argv-type", what, "argv", fix))
        return []
    words = []
    for place, value in enumerate(argv):
        word = word_of(value)
        if word is None:
            what = f"expected a word, got {shown(value)}"
            fix = "give a str, a number or a path; a switch is a word by itself"
            reading.problems.append(Problem("argv-type", what, f"argv[{place}]", fix))
        else:
            words.append(word)
    # Words that are missing from a row give the others another meaning: problems of those would mislead.
    return [] if reading.problems else words


def _chunks(argv: Sequence[str]) -> Iterator[_Chunk]:
    chunk = _Chunk(spelling="")
    for word in argv:
        if not _LOOKS_LIKE_OPTION.match(word) or _is_number(word):
            chunk.words.append(word)
            continue
        if chunk.spelling or chunk.words:
            yield chunk
        spelling, equals, value = word.partition("=")
        chunk = _Chunk(spelling=spelling, attached=value if equals else None)
    if chunk.spelling or chunk.words:
        yield chunk


def _is_number(word: str) -> bool:
    """Is this ``-inf`` or the like? Digits after the dash do not look like an option in the first place."""
    try:
        float(word)
    except ValueError:
        return False
    return True


def _lacks_text(option: Option, chunk: _Chunk) -> bool:
    """Is this an option of which any text can be the value, without a value?"""
    takes_text = option.nargs != 0 and not option.choices and option.type in (str, text)
    return takes_text and not chunk.words and chunk.attached is None


def _read_option(option: Option, chunk: _Chunk, reading: Reading, dashed: str) -> None:
    """Read an option; ``dashed`` is the word behind it where only its dash keeps that from being the value."""
    words = chunk.words
    if option.nargs == 0:
        if chunk.attached is not None:
            words = [chunk.attached, *words]
        _refuse_words(words, f"after {chunk.spelling}, which takes no value", chunk.spelling, reading)
        _note(option, chunk.spelling, chunk.spelling in option.flags, reading)
        return
    if chunk.attached is not None:
        words, rest = [chunk.attached], words
    elif option.nargs == 1:
        words, rest = words[:1], words[1:]
    else:
        rest = []
    _refuse_words(rest, f"after {' '.join([chunk.spelling, *words])}", chunk.spelling, reading)
    if option.splits_commas:
        words = [part.strip() for word in words for part in word.split(",") if part.strip()]
    if not words:
        what, fix = f"{chunk.spelling} needs a value", _form(option, chunk.spelling)
        if dashed:
            what += f", and {dashed} is read as an option because it begins with a dash"
            fix = f"write {chunk.spelling}={shlex.quote(dashed)} if that is the value"
        reading.problems.append(Problem("missing-value", what, chunk.spelling, fix))
        reading.wrong.add(option.dest)
        return
    values = [_convert(option, word, chunk.spelling, reading) for word in words]
    if option.dest not in reading.wrong:
        _note(option, chunk.spelling, values[0] if option.nargs == 1 else tuple(values), reading)


def _convert(option: Option, word: str, spelling: str, reading: Reading) -> Any:
    code, expected, fix = "malformed-value", "", _form(option, spelling)
    if option.choices and word not in option.choices:
        new = (choice for choice in option.choices if choice not in OLD_MODULES or option.dest not in _MODULES)
        code, expected = "unknown-choice", "one of " + ", ".join(new)
        fix = REMOVED.get(word) or suggestion(word, option.choices, "use one of these")
    else:
        try:
            return option.type(word)
        except ValueError as error:
            expected = str(error)
    what = f"{spelling}: expected {expected}, got {word!r}"
    reading.problems.append(Problem(code, what, spelling, fix))
    reading.wrong.add(option.dest)
    return None


def _note(option: Option, spelling: str, value: Any, reading: Reading) -> None:
    earlier = reading.values.get(option.dest, value)
    if earlier != value:
        what = f"{spelling} is given more than once: the last one counts"
        reading.notices.append(Notice("given-twice", what, spelling, "leave the others out"))
    reading.values[option.dest] = value


def _refuse_words(words: Sequence[str], place: str, spelling: str, reading: Reading) -> None:
    if words:
        what = f"unexpected {' '.join(repr(word) for word in words)} {place}"
        fix = "leave it out, or name the option it is for"
        reading.problems.append(Problem("unexpected-value", what, spelling, fix))


def _form(option: Option, spelling: str) -> str:
    """Return how the option is written, with an example for most numbers: the default, where that can be written."""
    word = option.metavar or "|".join(option.choices) or option.dest.upper()
    form = f"write {spelling} {word}" + (" ..." if option.nargs == "+" else "")
    if option.choices:
        return form
    for example in (option.default, 0.1):
        # Read as a user's word would be: a default of 0 may stand for an option that is left out.
        if isinstance(example, int | float) and _reads_as(option, example):
            return f"{form}, such as {spelling} {example}"
    return form


def _reads_as(option: Option, value: float) -> bool:
    try:
        return bool(option.type(str(value)) == value)
    except ValueError:
        return False
