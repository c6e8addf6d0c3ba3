"""A progress bar for the time in which a model's regions are captured."""

from __future__ import annotations

import sys
import time
from types import TracebackType

import torch.distributed
from rich.console import Console
from rich.errors import LiveError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Column

MIB = 2**20
MIN_SECONDS_BETWEEN_FRAMES = 0.1


class CaptureProgress:
    """Shows how many regions are captured, which one was the last, and how much memory is allocated.

    A context manager; the bar is gone when it ends, and nothing at all is written to what is not a terminal. It is
    drawn by :meth:`advance` only, never by a thread of its own: no Python of ours runs beside a capture.

    Args:
        total: number of regions that are going to be captured.
        enabled: by default, shown if standard error is a terminal and this process is rank 0 or not distributed. True
            shows it on every rank, False nowhere.
        console: where to show it; by default standard error.
    """

    def __init__(self, total: int, *, enabled: bool | None = None, console: Console | None = None) -> None:
        self._total = total
        self._console = console if console is not None else _standard_error()
        wanted = _is_first_rank() if enabled is None else enabled
        self._is_enabled = wanted and total > 0 and self._console.is_terminal and not self._console.is_dumb_terminal
        self._progress: Progress | None = None
        self._task = TaskID(0)
        self._next_frame = 0.0

    @property
    def is_shown(self) -> bool:
        """True between entering and leaving, where there is somebody to show it to."""
        return self._progress is not None

    def __enter__(self) -> CaptureProgress:
        if self._is_enabled and self._progress is None:
            progress = Progress(
                TextColumn("capturing"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[memory]}", markup=False),
                # Last, and cut where the line ends: long names must not make the bar jump between one line and two.
                TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
                console=self._console,
                auto_refresh=False,
                transient=True,
            )
            self._task = progress.add_task("", total=self._total, memory="")
            try:
                progress.start()
            except LiveError:
                return self  # Somebody else's live display has the console; theirs stays.
            self._progress = progress
        return self

    def advance(self, name: str, memory_bytes: int | None = None) -> None:
        """Say that one more region is captured.

        Args:
            name: the region.
            memory_bytes: allocated memory of the device; None shows what was said before.

        Cost: at most ten times a second, a millisecond or two; otherwise next to nothing.
        """
        if self._progress is None:
            return
        self._progress.update(self._task, advance=1, description=name)
        if memory_bytes is not None:
            self._progress.update(self._task, memory=f"{memory_bytes / MIB:,.0f} MiB")
        now = time.monotonic()
        if now >= self._next_frame:
            self._next_frame = now + MIN_SECONDS_BETWEEN_FRAMES
            self._progress.refresh()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        progress, self._progress = self._progress, None
        if progress is not None:
            progress.stop()


def _standard_error() -> Console:
    # FORCE_COLOR makes rich take a file for a terminal. Colours do no harm there, a bar that redraws itself does.
    try:
        is_terminal = sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # closed
        is_terminal = False
    return Console(stderr=True, force_terminal=None if is_terminal else False)


def _is_first_rank() -> bool:
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or distributed.get_rank() == 0
