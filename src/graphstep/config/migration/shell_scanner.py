"""Cut a shell script into tokens: words with their places, operators, lists, line ends.

Reads the grammar of POSIX shells and the arrays of bash as far as it matters where a word begins and ends: quotes,
escapes, continuations, comments, expansions, redirections, here-documents. What an expansion yields is not known.

Source: POSIX.1-2024, Shell Command Language, section 2.3 (token recognition); the Bash Reference Manual for arrays.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from graphstep.config.migration.words import Word, line_of
from graphstep.errors import ConfigError, Problem

# fmt: off
_OPERATORS = (  # longest first
    "&>>", "<<<", "<<-", ";;&", "&&", "||", ";;", ";&", "|&", "&>", "<<", ">>", ">|", ">&", "<&", "<>",
    ";", "|", "&", "(", ")", "<", ">",
)
# fmt: on
_REDIRECTIONS = frozenset({"&>>", "&>", "<<<", ">>", ">|", ">&", "<&", "<>", "<", ">"})
_BLANK = re.compile(r"(?:[ \t]|\\\r?\n)+")
_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_END_OF_WORD = " \t\r\n;&|<>()"


@dataclass(frozen=True, slots=True)
class Operator:
    """``;``, ``&&``, a line end and the like."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class Array:
    """``NAME=( ... )`` or ``NAME+=( ... )``."""

    name: str
    is_appended: bool
    words: tuple[Word, ...]
    start: int


@dataclass(frozen=True, slots=True)
class HereDocument:
    """The lines behind ``<<``."""

    start: int
    text: str


Token = Word | Operator | Array | HereDocument


def scan(text: str, source: str) -> list[Token]:
    """Return the tokens of a script.

    Args:
        text: the script.
        source: its name, for messages.

    Raises:
        ConfigError: a quote, a parenthesis or a brace that is never closed.
    """
    try:
        return _Scanner(text, source).tokens()
    except RecursionError as error:
        what = "expansions and quotes are nested too deeply"
        raise ConfigError(Problem("shell-nesting", what, source, "name a shell script")) from error


@dataclass(slots=True)
class _Scanner:
    text: str
    source: str
    position: int = 0
    _pending: list[tuple[str, bool]] = field(default_factory=list)
    """Here-documents whose lines come after the end of this one: delimiter, and whether tabs before it count."""

    def tokens(self) -> list[Token]:
        found: list[Token] = []
        while (token := self._next(in_array=False)) is not None:
            if isinstance(token, Operator) and token.text in ("<<", "<<-"):
                self._read_delimiter(token.text == "<<-")
            elif isinstance(token, Operator) and token.text in _REDIRECTIONS:
                target = self._next(in_array=False)  # not a word of the command
                if target is not None and not isinstance(target, Word):
                    found.append(target)
            else:
                found.append(token)
                if isinstance(token, Operator) and token.text == "\n":
                    found += self._here_documents()
        return found

    def _next(self, *, in_array: bool) -> Token | None:
        self._skip_blanks(in_array)
        start = self.position
        if start >= len(self.text):
            return None
        if self.text.startswith("((", start):  # arithmetic
            self._skip_balanced("(", ")")
            return Word(start, self.position, self.text[start : self.position], None)
        operator = next((o for o in ("\n", *_OPERATORS) if self.text.startswith(o, start)), None)
        if operator is not None and not self.text.startswith(("<(", ">("), start):
            self.position += len(operator)
            return Operator(operator, start)
        array = None if in_array else _ARRAY.match(self.text, start)
        if array is not None and self.text.startswith("(", array.end()):
            self.position = array.end() + 1
            return Array(array[1], bool(array[2]), self._array_words(start), start)
        word = self._word()
        is_descriptor = word.raw.isdigit() and self.text[self.position : self.position + 1] in ("<", ">")
        return self._next(in_array=in_array) if is_descriptor else word

    def _array_words(self, start: int) -> tuple[Word, ...]:
        words: list[Word] = []
        while (token := self._next(in_array=True)) is not None:
            if token == Operator(")", self.position - 1):
                return tuple(words)
            if isinstance(token, Word):
                words.append(Word(token.start, token.end, token.raw, token.value, start))
        raise self._unclosed("(", start)

    def _skip_blanks(self, in_array: bool) -> None:
        while self.position < len(self.text):
            blank = _BLANK.match(self.text, self.position)
            if blank is not None:
                self.position = blank.end()
            elif self.text[self.position] == "\r" or (in_array and self.text[self.position] == "\n"):
                self.position += 1
            elif self.text[self.position] == "#":
                end = self.text.find("\n", self.position)
                self.position = len(self.text) if end < 0 else end
            else:
                return

    def _read_delimiter(self, strips_tabs: bool) -> None:
        self._skip_blanks(False)
        word = self._word()
        self._pending.append((re.sub(r"[\"'\\]", "", word.raw), strips_tabs))

    def _here_documents(self) -> list[Token]:
        found: list[Token] = []
        for delimiter, strips_tabs in self._pending:
            start = self.position
            while self.position < len(self.text):
                end = self.text.find("\n", self.position)
                end = len(self.text) if end < 0 else end
                line = self.text[self.position : end].rstrip("\r")
                self.position = min(end + 1, len(self.text))
                if (line.lstrip("\t") if strips_tabs else line) == delimiter:
                    break
            found.append(HereDocument(start, self.text[start : self.position]))
        self._pending.clear()
        return found

    def _word(self) -> Word:
        start = self.position
        parts: list[str] = []
        expands = False
        while self.position < len(self.text):
            character = self.text[self.position]
            if character in "<>" and self.position == start and self.text.startswith("(", start + 1):
                self.position += 1
                self._skip_balanced("(", ")")
                expands = True
            elif character in _END_OF_WORD:
                break
            elif character == "'":
                end = self.text.find("'", self.position + 1)
                if end < 0:
                    raise self._unclosed("'", self.position)
                parts.append(self.text[self.position + 1 : end])
                self.position = end + 1
            elif character == '"':
                expands |= self._double_quotes(parts)
            elif character == "\\":
                self._escape(parts)
            elif character in "$`":
                expands |= self._expansion(parts)
            else:
                parts.append(character)
                self.position += 1
        if self.position == start:  # a character that cannot begin a word: never stand still
            self.position += 1
        raw = self.text[start : self.position]
        return Word(start, self.position, raw, None if expands else "".join(parts))

    def _escape(self, parts: list[str]) -> None:
        newline = re.compile(r"\\\r?\n").match(self.text, self.position)
        if newline is not None:
            self.position = newline.end()
            return
        parts.append(self.text[self.position + 1 : self.position + 2])
        self.position = min(self.position + 2, len(self.text))

    def _double_quotes(self, parts: list[str]) -> bool:
        opened = self.position
        self.position += 1
        expands = False
        while self.position < len(self.text):
            character = self.text[self.position]
            if character == '"':
                self.position += 1
                return expands
            if character == "\\" and self.text[self.position + 1 : self.position + 2] in ("$", "`", '"', "\\", "\n"):
                self._escape(parts)
            elif character in "$`":
                expands |= self._expansion(parts)
            else:
                parts.append(character)
                self.position += 1
        raise self._unclosed('"', opened)

    def _expansion(self, parts: list[str]) -> bool:
        """Skip ``$NAME``, ``${...}``, ``$(...)`` or backquotes; returns False for a dollar sign that stands alone."""
        rest = self.text[self.position + 1 : self.position + 2]
        if self.text[self.position] == "`":
            end = re.compile(r"(?:[^`\\]|\\.)*`", re.DOTALL).match(self.text, self.position + 1)
            if end is None:
                raise self._unclosed("`", self.position)
            self.position = end.end()
            return True
        self.position += 1
        if rest == "(":
            self._skip_balanced("(", ")")
            return True
        if rest == "{":
            self._skip_balanced("{", "}")
            return True
        name = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]").match(self.text, self.position)
        if name is not None:
            self.position = name.end()
            return True
        if rest == "'":
            end = re.compile(r"'(?:[^'\\]|\\.)*'", re.DOTALL).match(self.text, self.position)
            if end is None:
                raise self._unclosed("$'", self.position)
            self.position = end.end()
            return True
        parts.append("$")
        return False

    def _skip_balanced(self, opening: str, closing: str) -> None:
        """Skip to behind the closing character; of commands, also quotes, comments and here-documents in between."""
        start, depth = self.position, 0
        has_commands = opening == "(" and not self.text.startswith("((", start)
        outer, self._pending = self._pending, []
        while self.position < len(self.text):
            character = self.text[self.position]
            if character == '"':
                self._double_quotes([])
                continue
            if character == "\\":
                self.position += 1
            elif character == "'" and opening == "(":
                end = self.text.find("'", self.position + 1)
                self.position = len(self.text) if end < 0 else end
            elif has_commands and self._skip_document_or_comment():
                continue
            elif character == opening:
                depth += 1
            elif character == closing:
                depth -= 1
            self.position += 1
            if depth == 0:
                self._pending = outer
                return
        raise self._unclosed(opening, start)

    def _skip_document_or_comment(self) -> bool:
        """Inside ``$(...)``: move on over a comment, the word behind ``<<``, or the lines it stands for."""
        rest = self.text[self.position : self.position + 3]
        if rest.startswith("#") and self.text[self.position - 1] in " \t\n":
            self._skip_blanks(False)
        elif rest.startswith("<<") and rest != "<<<":
            self.position += 3 if rest == "<<-" else 2
            self._read_delimiter(rest == "<<-")
        elif rest.startswith("\n") and self._pending:
            self.position += 1
            self._here_documents()
        elif rest == "<<<":
            self.position += 3
        else:
            return False
        return True

    def _unclosed(self, opening: str, position: int) -> ConfigError:
        line = line_of(self.text, position)
        what = f"{opening} is never closed"
        return ConfigError(Problem("shell-unclosed", what, f"{self.source}:{line}", "close it, or name a shell script"))
