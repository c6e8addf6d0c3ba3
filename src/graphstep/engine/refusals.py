"""What a capture refused. The refusal stands even if the function swallows the error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from graphstep.engine.user_frame import user_line
from graphstep.errors import CaptureError


@dataclass(slots=True)
class Refusals:
    """Raises refusals and remembers the first one.

    A logger that formats a tensor catches the error and goes on, and so may the function. On a GPU the capture is lost
    all the same, so it must not succeed here. Only text is kept: an error object would keep frames and their tensors.
    """

    _first: tuple[str, str, str] | None = None

    def refuse(self, what: str, fix: str, *, where: str = "") -> NoReturn:
        """Raise a :class:`CaptureError`. It names the user's line that is running, unless another one is given."""
        where = where or str(user_line() or "no Python frame of the user's")
        if self._first is None:
            self._first = (what, where, fix)
        raise CaptureError(what, where=where, fix=fix)

    def host_read(self, operation: str, fix: str) -> NoReturn:
        """Refuse an operation that needs a value on the host."""
        self.refuse(f"{operation} reads a value of a tensor on the host; a graph has no host to read it", fix)

    def storage_change(self, operation: str) -> NoReturn:
        """Refuse an operation that replaces or resizes memory."""
        self.refuse(
            f"{operation} replaces or resizes the storage of a tensor; a graph works on fixed storages",
            "allocate the tensor at its final size before the captured call and write into it",
        )

    def raise_swallowed(self) -> None:
        """Raise the first refusal again, if there was one."""
        if self._first is not None:
            what, where, fix = self._first
            raise CaptureError(f"{what} (the function caught this error and went on)", where=where, fix=fix)
