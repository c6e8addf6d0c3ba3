"""What a verification has found: a row for each module and kind of state, and the first module that differs."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from graphstep.errors import VerificationError
from graphstep.verification.compare import Difference


class Part(StrEnum):
    """What is compared."""

    FORWARD = "forward"
    """Results of a module, and arguments that it gets."""
    GRADIENT = "gradient"
    """Gradients of parameters; in a bisection those of results and arguments too."""
    BUFFER = "buffer"
    WEIGHT = "weight"
    OPTIMIZER = "optimizer"
    """State of an optimizer, by the module of its parameter."""
    RANDOM = "random numbers"
    """States of generators."""
    OTHER = "other tensor"
    """A tensor that the step writes and no module has."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of state of one module, over all verified steps."""

    module: str
    """Path of the module; empty for the step itself."""
    part: Part
    num_tensors: int
    difference: Difference | None = None
    """The largest one of the first step that differs."""
    step: int | None = None
    """That step, counted from 1."""

    @property
    def is_equal(self) -> bool:
        """The same bits, or within the tolerance."""
        return self.difference is None or self.difference.is_within

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "module": self.module,
            "part": str(self.part),
            "num_tensors": self.num_tensors,
            "is_equal": self.is_equal,
            "step": self.step,
            "difference": None if self.difference is None else self.difference.to_json(),
        }


@dataclass(frozen=True, slots=True)
class Culprit:
    """Where a replay first departs from eager."""

    module: str
    """Path of the module whose own code it is; empty for code outside of all modules."""
    part: Part
    difference: Difference
    how: str
    """How it was found, in words."""

    def __str__(self) -> str:
        where = self.module or "the step, outside of its modules"
        return f"{where}, {self.part}: {self.difference} ({self.how})"

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "module": self.module,
            "part": str(self.part),
            "how": self.how,
            "difference": self.difference.to_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The outcome of :func:`graphstep.verify`."""

    target: str
    """What was verified."""
    engine: str
    """Which engine has replayed."""
    num_steps: int
    """Steps that were run both ways."""
    num_replays: int
    """Replays in them; 0 proves nothing."""
    eager_calls: Mapping[str, int] = field(default_factory=dict)
    """Calls in them that ran eagerly on the side of the graphs, by reason: those prove nothing either."""
    rows: tuple[Row, ...] = ()
    first: Culprit | None = None
    """The first module that differs."""
    tolerance: str = ""
    """What was allowed, in words; empty: the same bits were asked for."""
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Replays gave what eager execution gave, and there were replays."""
        return self.num_replays > 0 and not self.differences

    @property
    def differences(self) -> tuple[Row, ...]:
        """Rows that differ by more than is allowed."""
        return tuple(row for row in self.rows if not row.is_equal)

    @property
    def within(self) -> tuple[Row, ...]:
        """Rows with other bits that are within the tolerance."""
        return tuple(row for row in self.rows if row.is_equal and row.difference is not None)

    def raise_if_different(self) -> VerifyReport:
        """Return the report itself if :attr:`equal`.

        Raises:
            VerificationError: a replay differs from eager, or nothing was replayed.
        """
        if self.equal:
            return self
        if not self.num_replays:
            reasons = ", ".join(f"{reason} ({count})" for reason, count in self.eager_calls.items())
            raise VerificationError(
                f"no step was replayed, so that nothing is proved{': ' + reasons if reasons else ''}",
                where=self.target,
                fix="see report() of what was captured for the reasons; more warmup_calls let it capture",
            )
        first = self.first
        worst = self.differences[0]
        found = str(first) if first is not None else f"{worst.module or self.target}, {worst.part}: {worst.difference}"
        raise VerificationError(
            f"a replay differs from eager execution; first {found}",
            where=self.target,
            fix="graphs repeat what Python did at the capture: look there for values that Python keeps or computes; "
            "kernels that differ from run to run need a tolerance (rtol, atol)",
        )

    def summary(self) -> str:
        """The outcome in one sentence."""
        steps = _count(self.num_steps, "step")
        if not self.num_replays:
            return f"nothing was replayed in {steps}, so that nothing is proved"
        compared = f"{sum(row.num_tensors for row in self.rows)} tensors and states"
        if self.equal:
            how = "bit for bit" if not self.within else f"within the tolerance ({self.tolerance})"
            return f"equal {how}: {compared} in {steps}, {_count(self.num_replays, 'replay')}"
        where = f"; first: {self.first}" if self.first is not None else ""
        return f"DIFFERENT: {len(self.differences)} of {len(self.rows)} rows within {steps}{where}"

    def render(self) -> Group:
        """A table for a terminal: rows that differ one by one, the others counted."""
        table = Table(title=f"replay against eager: {self.target}", title_justify="left")
        for heading in ("module", "part", "tensors", "step", "largest error", "where"):
            table.add_column(heading, overflow="fold", justify="right" if heading == "largest error" else "left")
        for row in (*self.differences, *self.within):
            self._add(table, row)
        for part in Part:
            rows = [row for row in self.rows if row.part is part and row.difference is None]
            if rows:
                number = str(sum(row.num_tensors for row in rows))
                table.add_row(_modules(rows), str(part), number, "", "0", "same bits")
        return Group(table, *(Text(line) for line in (self.summary(), *self._eager_notes(), *self.notes)))

    def __str__(self) -> str:
        """The table as plain text."""
        console = Console(file=io.StringIO(), width=120, color_system=None)
        with console.capture() as captured:
            console.print(self.render())
        return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "target": self.target,
            "engine": self.engine,
            "is_equal": self.equal,
            "num_steps": self.num_steps,
            "num_replays": self.num_replays,
            "eager_calls": dict(self.eager_calls),
            "tolerance": self.tolerance,
            "first": None if self.first is None else self.first.to_json(),
            "rows": [row.to_json() for row in self.rows],
            "notes": list(self.notes),
        }

    @staticmethod
    def _add(table: Table, row: Row) -> None:
        found = row.difference
        if found is None:
            return
        error = f"{found.max_error:.3g}" + (" (allowed)" if found.is_within else "")
        cells = (row.module or "(step)", str(row.part), str(row.num_tensors), str(row.step), error, str(found))
        table.add_row(*map(Text, cells))

    def _eager_notes(self) -> list[str]:
        return [f"ran eagerly, so that it proves nothing: {n} calls, {why}" for why, n in self.eager_calls.items()]


def _modules(rows: Iterable[Row]) -> str:
    number = len({row.module for row in rows if row.module})
    if not number:
        return "(step)"
    return _count(number, "module")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
