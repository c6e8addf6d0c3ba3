"""Regions that could not be captured: what is said about them."""

from __future__ import annotations

import warnings
from typing import Final

from graphstep.capture.report import joined
from graphstep.errors import CaptureError

OR_EAGERLY: Final = "; or let such calls run eagerly: policy='auto' (--cuda-graph-policy auto)"
"""Ends the advice where a policy insists on graphs."""


def cause(name: str, error: CaptureError) -> str:
    """Return why a region is not captured, without its name: regions that share a cause are told together.

    Args:
        name: of the region.
        error: of its capture.
    """
    where = error.where.removeprefix(name).lstrip(",; ")
    return f"{error.what} ({where})" if where else error.what


class CaptureFailures:
    """Failed captures of one step. Keeps words only: an error holds frames, and those hold the tensors of the step."""

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], list[str]] = {}
        self._texts: dict[tuple[str, str], str] = {}

    def add(self, name: str, error: CaptureError) -> None:
        """Note that the region of this name could not be captured."""
        key = (cause(name, error), error.fix)
        self._names.setdefault(key, []).append(name)
        self._texts.setdefault(key, str(error))

    def warn(self, stacklevel: int) -> None:
        """Warn that regions run eagerly, once for each cause.

        Args:
            stacklevel: of the warnings, counted from the caller.
        """
        for key, names in self._names.items():
            run = "runs" if len(names) == 1 else "run"
            warnings.warn(f"{joined(names)} {run} eagerly: {self._texts[key]}", UserWarning, stacklevel=stacklevel + 1)
