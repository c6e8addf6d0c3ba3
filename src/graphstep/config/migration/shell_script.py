"""Find the commands and the arrays of a shell script."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from graphstep.config.migration.shell_scanner import Array, HereDocument, Operator, Token, scan
from graphstep.config.migration.words import Word

_PREFIXES = frozenset({"if", "then", "else", "elif", "while", "until", "do", "!", "{", "time"})
_OPENING = frozenset({"if", "while", "until", "for", "select", "case", "{"})
_CLOSING = frozenset({"fi", "done", "esac", "}"})
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
_LEFT_ALONE = frozenset({"[[", "[", "test", "for", "select", "function"})
_ONLY_TEXT = frozenset({"echo", "printf", "grep", "egrep", "fgrep", "rg", "sed", "awk", "graphstep"})


class Kind(Enum):
    """What a list of words is."""

    COMMAND = "command"
    ARRAY = "array"
    OTHER = "other"
    """A test, a loop over words, a pattern: its words are no options of a program."""
    TEXT = "text"
    """Words that are printed or searched for."""


@dataclass(frozen=True, slots=True)
class Fragment:
    """A list of words."""

    kind: Kind
    words: tuple[Word, ...]
    name: str = ""
    """Name of the array."""
    is_appended: bool = False
    """The array gets these words behind those it has."""
    is_certain: bool = True
    """Runs whenever the script does: no condition, loop or function around it."""


@dataclass(slots=True)
class Script:
    """A shell script."""

    fragments: list[Fragment] = field(default_factory=list)
    """Commands and arrays, in the order of the text."""
    variables: dict[str, list[Word]] = field(default_factory=dict)
    """Variables that are no arrays, and everything that is assigned to them (the whole assignment)."""
    here_documents: list[HereDocument] = field(default_factory=list)
    """Texts between the lines."""


def read_script(text: str, source: str) -> Script:
    """Return the commands and arrays of a script.

    Args:
        text: the script.
        source: its name, for messages.

    Raises:
        ConfigError: it cannot be read.
    """
    reader = _Reader()
    for token in scan(text, source):
        reader.read(token)
    reader.finish(None)
    return reader.script


def array_reference(word: Word) -> str:
    """Return the name of the array or variable that this word consists of, or an empty text."""
    found = re.fullmatch(r'("?)\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?\})\1', word.raw)
    return (found[2] or found[3]) if found else ""


@dataclass(slots=True)
class _Reader:
    script: Script = field(default_factory=Script)
    _words: list[Word] = field(default_factory=list)
    _nesting: list[str] = field(default_factory=list)
    """Open compound commands: ``if``, ``(``, ``pattern`` (of a ``case``) and the like."""
    _is_conditional: bool = False
    """The command stands behind ``&&`` or ``||``."""

    def read(self, token: Token) -> None:
        if isinstance(token, Word):
            self._word(token)
        elif isinstance(token, Array):
            fragment = Fragment(Kind.ARRAY, token.words, token.name, token.is_appended, self._is_certain())
            self.script.fragments.append(fragment)
        elif isinstance(token, HereDocument):
            self.script.here_documents.append(token)
        else:
            self._operator(token)

    def _word(self, word: Word) -> None:
        is_first = not self._words
        if is_first and word.raw == "esac" and self._nesting[-1:] in (["case"], ["pattern"]):
            self._nesting.pop()
            return
        if is_first and self._nesting[-1:] != ["pattern"]:
            if word.raw in _OPENING:
                self._nesting.append(word.raw)
            elif word.raw in _CLOSING and self._nesting:
                self._nesting.pop()
            if word.raw in _PREFIXES or word.raw in _CLOSING:
                return
        self._words.append(word)
        if word.raw == "in" and len(self._words) == 3 and self._words[0].raw == "case":
            self._nesting[-1:] = ["pattern"]
            self._emit(Kind.OTHER)

    def _operator(self, operator: Operator) -> None:
        if self._nesting[-1:] == ["pattern"]:
            if operator.text == ")":
                self._emit(Kind.OTHER)
                self._nesting[-1] = "case"
            return
        if self._words and self._words[0].raw == "[[" and self._words[-1].raw != "]]" and operator.text != "\n":
            return
        if operator.text == "(" and len(self._words) == 1:  # name() begins a function
            self._words.clear()
        self.finish(operator)
        if operator.text == "(":
            self._nesting.append("(")
        elif operator.text == ")" and "(" in self._nesting:
            while self._nesting.pop() != "(":
                pass
        elif operator.text in (";;", ";&", ";;&") and self._nesting[-1:] == ["case"]:
            self._nesting[-1] = "pattern"
        self._is_conditional = operator.text in ("&&", "||")

    def finish(self, operator: Operator | None) -> None:
        """The command ends here."""
        if not self._words:
            return
        first = self._words[0].raw
        if first == "function" and self._words[-1].raw == "{":
            self._nesting.append("{")
        unpaired = operator is not None and operator.text == ")" and "(" not in self._nesting
        self._emit(Kind.OTHER if first in _LEFT_ALONE or unpaired else Kind.COMMAND)

    def _emit(self, kind: Kind) -> None:
        words = tuple(self._words)
        self._words.clear()
        while kind is Kind.COMMAND and words and (assigned := _ASSIGNMENT.match(words[0].raw)):
            self.script.variables.setdefault(assigned[1], []).append(words[0])
            words = words[1:]
        if kind is Kind.COMMAND and words:
            if words[0].raw in ("declare", "local", "export", "readonly", "typeset"):
                kind = Kind.OTHER
                for word in words[1:]:
                    if assigned := _ASSIGNMENT.match(word.raw):
                        self.script.variables.setdefault(assigned[1], []).append(word)
                words = tuple(word for word in words if not _ASSIGNMENT.match(word.raw))
            elif words[0].raw.rsplit("/", 1)[-1] in _ONLY_TEXT:
                kind = Kind.TEXT
        if words:
            self.script.fragments.append(Fragment(kind, words, is_certain=self._is_certain()))

    def _is_certain(self) -> bool:
        return not self._nesting and not self._is_conditional


def assigned_texts(variables: Mapping[str, list[Word]], name: str) -> list[str | None]:
    """Return what is assigned to a variable; ``None`` stands for what only a run can tell."""
    words = variables.get(name, ())
    return [None if word.value is None else word.value.partition("=")[2] for word in words]
