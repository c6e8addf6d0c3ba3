"""What a rewriter gives back."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from graphstep.config.validation import Notice

_LINES = re.compile(r"[^\n]*\n|[^\n]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewrite:
    """A text in its old and its new form."""

    source: str
    """Name of the text, for messages."""
    before: str
    """The text as it was."""
    after: str
    """The text with new options in place of old ones."""
    changes: tuple[Notice, ...] = ()
    """What was rewritten, with places."""
    left: tuple[Notice, ...] = ()
    """Old options that cannot be rewritten safely: places, reasons, what to do by hand."""

    @property
    def is_changed(self) -> bool:
        """Is there anything to write?"""
        return self.before != self.after

    def diff(self) -> str:
        """Return the unified diff, empty if nothing changed."""
        lines = difflib.unified_diff(
            _LINES.findall(self.before),
            _LINES.findall(self.after),
            f"{self.source} (old)",
            f"{self.source} (new)",
        )
        return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
