"""What was captured, what was not, and what it cost."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


@dataclass(slots=True)
class RegionStats:
    """Counts of one region, kept by the session while it runs."""

    name: str
    kind: str
    num_recordings: int = 0
    num_operations: int = 0
    """Operations of all its recordings: steps of a tape, nodes of a CUDA graph."""
    capture_seconds: float = 0.0
    pool_bytes: int = 0
    static_bytes: int = 0
    num_replays: int = 0
    eager_calls: Counter[str] = field(default_factory=Counter)
    """Calls that ran eagerly, by reason."""
    last_mismatch: tuple[str, ...] = ()
    """What differed from the captured signature, with paths, when a call last ran eagerly for that."""

    def copy(self) -> RegionStats:
        """The counts of this moment."""
        return replace(self, eager_calls=self.eager_calls.copy())


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """A snapshot of a session's regions."""

    engine: str
    rows: tuple[RegionStats, ...]
    pool_bytes: int

    @property
    def num_recordings(self) -> int:
        """Recordings that exist."""
        return sum(row.num_recordings for row in self.rows)

    @property
    def capture_seconds(self) -> float:
        """Time spent in warmup and capture, in seconds."""
        return sum(row.capture_seconds for row in self.rows)

    def render(self) -> Table:
        """A table for a terminal."""
        title = f"captured: {self.num_recordings} recordings, {self.engine} engine"
        table = Table(title=title, title_justify="left")
        for name in ("region", "recordings", "operations", "capture s", "replays"):
            table.add_column(name, justify="left" if name == "region" else "right", no_wrap=True)
        table.add_column("eager calls", overflow="fold")
        for row in self.rows:
            eager = ", ".join(f"{count} {reason}" for reason, count in row.eager_calls.items())
            if row.last_mismatch:
                eager += f" (last: {'; '.join(row.last_mismatch)})"
            counts = (row.num_recordings, row.num_operations, f"{row.capture_seconds:.2f}", row.num_replays)
            table.add_row(escape(row.name), *map(str, counts), escape(eager))
        return table

    def __str__(self) -> str:
        """The table as plain text."""
        console = Console(file=io.StringIO(), width=120, color_system=None)
        with console.capture() as captured:
            console.print(self.render())
        return captured.get().rstrip()

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "engine": self.engine,
            "num_recordings": self.num_recordings,
            "capture_seconds": self.capture_seconds,
            "pool_bytes": self.pool_bytes,
            "regions": [
                {
                    "name": row.name,
                    "kind": row.kind,
                    "num_recordings": row.num_recordings,
                    "num_operations": row.num_operations,
                    "capture_seconds": row.capture_seconds,
                    "pool_bytes": row.pool_bytes,
                    "static_bytes": row.static_bytes,
                    "num_replays": row.num_replays,
                    "eager_calls": dict(row.eager_calls),
                    "last_mismatch": list(row.last_mismatch),
                }
                for row in self.rows
            ],
        }
