"""Where a text ends that must not contain some others."""

from __future__ import annotations

from collections.abc import Sequence

from graphstep.inference.text import TextStream


class StoppedText:
    """The text of one sequence, piece by piece, up to the first stop text.

    Held back are bytes that are no whole character, and text that a stop text may begin with. The pieces together do
    not depend on how tokens arrive.

    Args:
        stream: turns tokens into text.
        stop: texts that end the sequence; not part of it.
    """

    def __init__(self, stream: TextStream, stop: Sequence[str] = ()) -> None:
        self._stream = stream
        self._stop = tuple(stop)
        self._held = ""
        self.is_stopped = False
        """Has a stop text been found?"""
        self.length = 0
        """Characters of the text so far, held ones included."""

    def add(self, token: int) -> str:
        """Add a token; return the text that is certain now."""
        return self._take(self._stream.add(token), is_last=False)

    def finish(self) -> str:
        """Return what was held back; for the end of the sequence."""
        return self._take(self._stream.finish(), is_last=True)

    def _take(self, text: str, *, is_last: bool) -> str:
        if self.is_stopped:
            return ""
        self.length += len(text)
        text = self._held + text
        self._held = ""
        found = [(place + len(stop), place) for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            # Of several the one that is complete first, as if characters came one by one.
            return text[: min(found)[1]]
        num_held = 0 if is_last else self._could_begin_stop(text)
        if num_held:
            self._held = text[-num_held:]
            return text[:-num_held]
        return text

    def _could_begin_stop(self, text: str) -> int:
        """Return how many characters at the end a stop text may begin with."""
        longest = 0
        for stop in self._stop:
            lengths = range(min(len(stop) - 1, len(text)), longest, -1)
            longest = next((length for length in lengths if text.endswith(stop[:length])), longest)
        return longest
