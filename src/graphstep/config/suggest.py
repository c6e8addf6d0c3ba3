"""Suggestions for words that are nearly right."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def suggestion(word: str, words: Iterable[str], otherwise: str = "") -> str:
    """Return ``did you mean ...?`` for the known word closest to ``word``, or ``otherwise`` when none is close."""
    known = {known.lower(): known for known in words}
    close = get_close_matches(word.lower(), known, n=1, cutoff=0.6)
    return f"did you mean {known[close[0]]}?" if close else otherwise
