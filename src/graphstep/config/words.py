"""Values that stand where a command line or the environment has words."""

from __future__ import annotations

import os


def word_of(value: object) -> str | None:
    """Return a value as a shell would pass it on; None if that can mean two things.

    Args:
        value: anything. Numbers and paths are taken; True, None and lists have no such form.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, os.PathLike):
        path = os.fspath(value)
        return path if isinstance(path, str) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return str(value)
    except ValueError:  # more digits than Python writes
        return None


def shown(value: object) -> str:
    """Return a value for a message."""
    try:
        text = repr(value)
    except ValueError:
        return f"a very large {type(value).__name__}"
    return text if len(text) <= 80 else text[:77] + "..."
