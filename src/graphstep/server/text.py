"""Text of tokens as they come, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

_REPLACEMENT: Final = "\ufffd"
_MOST_HELD = 8
"""Tokens that are held back because their bytes are no whole character yet. One has four bytes at most."""


class TextTokenizer(Protocol):
    """What serving needs of a tokenizer."""

    def encode(self, text: str) -> Any:
        """Return token numbers of a text: a sequence or an array."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; special ones have none."""


class TextStream:
    """Turns the tokens of one sequence into pieces of text, which end before the first stop string.

    Held back are bytes that are no whole character, and text that a stop string may begin with. The pieces together do
    not depend on how tokens arrive.

    Args:
        tokenizer: decodes.
        stop: texts that end the sequence; not part of it.
    """

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._context = 0
        self._read = 0
        self._held = ""
        self.is_stopped = False
        """Has a stop string been found?"""
        self.length = 0
        """Characters of the text so far, held ones included."""

    def push(self, token: int) -> str:
        """Add a token; return the text that is certain now."""
        self._tokens.append(token)
        return self._take(self._decode(is_last=False), is_last=False)

    def finish(self) -> str:
        """Return what was held back; for the end of the sequence."""
        return self._take(self._decode(is_last=True), is_last=True)

    def _decode(self, *, is_last: bool) -> str:
        # Some decoders treat a first token differently, so that new tokens are decoded behind a few old ones.
        decode, context = self._tokenizer.decode, self._context
        before = decode(self._tokens[context : self._read])
        text = decode(self._tokens[context:])
        if not text.endswith(_REPLACEMENT):
            if len(text) > len(before):
                self._context, self._read = self._read, len(self._tokens)
            return text[len(before) :]
        if not is_last and len(self._tokens) - self._read < _MOST_HELD:
            return ""
        self._context = self._read = len(self._tokens)
        return text[len(before) :]

    def _take(self, text: str, *, is_last: bool) -> str:
        if self.is_stopped:
            return ""
        self.length += len(text)
        text = self._held + text
        self._held = ""
        ends = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if ends:
            self.is_stopped = True
            return text[: min(ends)]
        if not is_last:
            num_held = self._could_begin_stop(text)
            if num_held:
                self._held = text[-num_held:]
                return text[:-num_held]
        return text

    def _could_begin_stop(self, text: str) -> int:
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:length]):
                    longest = length
                    break
        return longest
