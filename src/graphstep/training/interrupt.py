"""Stop between two steps when the user presses Ctrl-C."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class InterruptRequest:
    """Context in which the first SIGINT is noted and the second one interrupts at once.

    Only the main thread of a program can take signals; in any other thread this does nothing. The former handler is
    restored at the end.
    """

    def __init__(self) -> None:
        self.is_requested = False
        self._before: Any = None
        self._is_installed = False

    def __enter__(self) -> InterruptRequest:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
            self._is_installed = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_installed:
            # None stands for a handler that was not installed from Python and cannot be put back.
            signal.signal(signal.SIGINT, signal.SIG_DFL if self._before is None else self._before)
            self._is_installed = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True
