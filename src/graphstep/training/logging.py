"""Where the numbers of a run go: the console, a file of JSON lines, TensorBoard.

Every log takes events: a name and values that JSON can hold. ``start`` opens a run (with its configuration), ``train``
comes every ``log_interval`` steps, ``validation`` after each validation, ``checkpoint`` after each save, ``warning``
any time, ``end`` last (with the report of what was captured). ``verification`` comes first and ``shadow`` after steps
that also ran eagerly, both with a report of what differs. All other values are numbers and words.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from graphstep.config import TrainingConfig
from graphstep.errors import Problem

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Values = Mapping[str, Any]
"""Values that JSON can hold, by name."""


class MetricsLog(Protocol):
    """Something that takes events."""

    def write(self, event: str, values: Values) -> None:
        """Take one event."""

    def close(self) -> None:
        """Flush and release; may be called twice."""


class LogFanout:
    """Hands each event to several logs."""

    def __init__(self, logs: Iterable[MetricsLog] = ()) -> None:
        self._logs = tuple(logs)

    def write(self, event: str, values: Values) -> None:
        """Hand on one event."""
        for log in self._logs:
            log.write(event, values)

    def close(self) -> None:
        """Close all logs."""
        for log in self._logs:
            log.close()


class ConsoleLog:
    """A progress line on a terminal, one line per event anywhere else.

    The line is redrawn only when an event comes: no thread competes with the training loop.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def write(self, event: str, values: Values) -> None:
        """Print or redraw."""
        if event == "start":
            self._start(values)
        elif event == "train" and self._progress is not None:
            self._progress.update(
                self._task, completed=_number(values, "iteration"), text=describe(values), refresh=True
            )
        elif event == "train":
            self._line(f"iteration {values['iteration']:>7}/{values['train_iters']} | {describe(values)}")
        elif event == "validation":
            self._line(f"validation at iteration {values['iteration']} | loss {_number(values, 'loss'):.4f}")
        elif event == "checkpoint":
            self._line(f"checkpoint of iteration {values['iteration']} written to {values['path']}")
        elif event == "warning":
            self._line(f"warning: {values['message']}")
        elif event == "shadow":
            self._line(f"replay against eager at iteration {values['iteration']} | {values['text']}")
        elif event == "end":
            self.close()

    def close(self) -> None:
        """Stop redrawing."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def _start(self, values: Values) -> None:
        self.close()
        if self._console.is_terminal:
            columns = (
                TextColumn("iteration {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(20),
                TextColumn("{task.fields[text]}"),
            )
            self._progress = Progress(*columns, console=self._console, auto_refresh=False, transient=True)
            self._progress.start()
            self._task = self._progress.add_task(
                "", total=_number(values, "train_iters"), completed=int(_number(values, "iteration")), text=""
            )

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class JsonLinesLog:
    """One JSON object a line, appended to a file that is made with the first event.

    Numbers that are not finite become null: JSON has no name for them.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def write(self, event: str, values: Values) -> None:
        """Append one line and flush it."""
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a", encoding="utf-8")
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._file.write(json.dumps({"event": event, **finite}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class TensorBoardLog:
    """Scalars ``train/...`` and ``validation/...`` for TensorBoard, in a folder that is made with the first event."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def write(self, event: str, values: Values) -> None:
        """Write the numbers of training and validation events; others are ignored."""
        if event not in ("train", "validation"):
            return
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._folder))
        step = int(_number(values, "iteration"))
        for key, value in values.items():
            if isinstance(value, int | float) and key not in ("iteration", "train_iters"):
                self._writer.add_scalar(f"{event}/{key}", value, step)

    def close(self) -> None:
        """Flush and close the writer."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def make_logs(config: TrainingConfig, console: Console | None) -> LogFanout:
    """Return the logs that the options ask for, and the console if there is one; nothing is created on disk yet."""
    logs: list[MetricsLog] = [] if console is None else [ConsoleLog(console)]
    if config.log_jsonl is not None:
        logs.append(JsonLinesLog(Path(config.log_jsonl)))
    if config.tensorboard_dir is not None:
        logs.append(TensorBoardLog(Path(config.tensorboard_dir)))
    return LogFanout(logs)


def tensorboard_problem() -> Problem | None:
    """Return what is missing for ``--tensorboard-dir``, or None."""
    if importlib.util.find_spec("tensorboard") is not None:
        return None
    return Problem(
        "tensorboard-missing",
        "the package tensorboard is not installed",
        where="--tensorboard-dir",
        fix="pip install 'graphstep[report]', or use --log-jsonl instead",
    )


_ROUTER_LOSSES = (("load_balancing_loss", "balancing"), ("z_loss", "z"))
"""Losses of routers, where there are some, and what the line calls them."""


def describe(values: Values) -> str:
    """Return the numbers of a ``train`` event as text."""
    parts = [
        f"loss {_number(values, 'loss'):.4f}",
        *(f"{text} {_number(values, key):.4f}" for key, text in _ROUTER_LOSSES if key in values),
        f"lr {_number(values, 'learning_rate'):.3e}",
        f"grad norm {_number(values, 'grad_norm'):.3f}",
        f"{_number(values, 'step_ms'):.1f} ms/step",
        f"{_number(values, 'tokens_per_second'):,.0f} tokens/s",
    ]
    return " | ".join(parts)


def _number(values: Values, key: str) -> float:
    value = values.get(key)
    return float(value) if isinstance(value, int | float) else math.nan
