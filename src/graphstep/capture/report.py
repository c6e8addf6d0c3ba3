"""What was captured, what was not and why, and what it cost."""

from __future__ import annotations

import io
import re
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from graphstep.capture.reasons import EagerReason, advice, reason_of

if TYPE_CHECKING:
    from torch import nn

    from graphstep.coverage import StepMeasurement

MIB = 2**20
EXPECTED = (EagerReason.OBSERVED, EagerReason.EVALUATION)
"""Eager calls that nobody expects to be replays."""
WITHOUT_ADVICE = (*EXPECTED, EagerReason.NOT_CAPTURED_YET)
"""Reasons that pass by themselves; reports give no advice for them."""


class ModuleReference(weakref.ref["nn.Module"]):
    """Refers to a module of this process: in a report that is sent to another one, to none."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


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
    """Calls that ran eagerly, by reason: an :class:`EagerReason`, or a text of the strategy's own.

    A replay whose backward was computed again counts here too.
    """
    last_mismatch: tuple[str, ...] = ()
    """What differed from the captured signature, with paths, when a call last ran eagerly for that."""
    num_slots: int = 0
    """Microbatches in flight that have graphs."""
    num_signatures: int = 0
    """Signatures that have graphs."""
    num_evictions: int = 0
    """Signatures whose graphs were given up for those of others."""
    num_launches: int = 0
    """Graph launches; fewer than replays where one launch serves several regions."""
    why_not_captured: str = ""
    """Why there is no recording, with cause and line if the capture failed."""
    last_detail: str = ""
    """What exactly was in the way when a call last ran eagerly: names an attribute, argument, parameter or result."""
    module: ModuleReference | None = field(default=None, repr=False, compare=False)
    """What it is the forward of, where its name is no path; not kept alive."""

    @property
    def is_captured(self) -> bool:
        """True if there are recordings to replay; with merged layers they are counted at the first and the last."""
        return self.num_recordings > 0 or self.num_signatures > 0

    @property
    def num_hits(self) -> int:
        """Calls that were replays."""
        return self.num_replays

    @property
    def num_misses(self) -> int:
        """Calls that ran eagerly although they might have been replays: all but the observed ones and evaluation."""
        return sum(count for reason, count in self.eager_calls.items() if reason not in EXPECTED)

    def copy(self) -> RegionStats:
        """The counts of this moment."""
        return replace(self, eager_calls=self.eager_calls.copy())

    def to_json(self) -> dict[str, Any]:
        """The same as plain data. A reason that is a text of the strategy's own has no code."""
        return {
            "name": self.name,
            "kind": self.kind,
            "is_captured": self.is_captured,
            "why_not_captured": self.why_not_captured,
            "num_slots": self.num_slots,
            "num_signatures": self.num_signatures,
            "num_evictions": self.num_evictions,
            "num_recordings": self.num_recordings,
            "num_operations": self.num_operations,
            "capture_seconds": self.capture_seconds,
            "pool_bytes": self.pool_bytes,
            "static_bytes": self.static_bytes,
            "num_replays": self.num_replays,
            "num_launches": self.num_launches,
            "num_hits": self.num_hits,
            "num_misses": self.num_misses,
            "eager_calls": {str(reason): count for reason, count in self.eager_calls.items()},
            "eager_reasons": [
                {
                    "code": found.code if (found := reason_of(reason)) else None,
                    "reason": str(reason),
                    "num_calls": count,
                    "advice": "" if reason in WITHOUT_ADVICE else advice(reason),
                }
                for reason, count in self.eager_calls.items()
            ],
            "last_mismatch": list(self.last_mismatch),
            "last_detail": self.last_detail,
        }


@dataclass(frozen=True, slots=True)
class EagerPart:
    """A part of a layer that is no region: nobody asked to capture it."""

    name: str
    kind: str
    why: str

    def to_json(self) -> dict[str, str]:
        """The same as plain data."""
        return {"name": self.name, "kind": self.kind, "why": self.why}


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Memory of the recordings that share it."""

    name: str
    nbytes: int

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {"name": self.name, "bytes": self.nbytes}


def lane_name(lane: Hashable) -> str:
    """A lane of an engine in words: ``forwards of slot 1``."""
    match lane:
        case ("forward", 0, int(slot)):
            return f"forwards of slot {slot}"
        case ("forward", group, int(slot)):
            return f"forwards of group {group}, slot {slot}"
        case "backward":
            return "backwards"
        case 0:
            return "recordings"
        case tuple():
            return " ".join(map(str, lane))
    return str(lane)


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """A snapshot of a session's regions."""

    engine: str
    rows: tuple[RegionStats, ...]
    pool_bytes: int
    eager_parts: tuple[EagerPart, ...] = ()
    pools: tuple[PoolUse, ...] = ()
    """``pool_bytes`` by the recordings that share memory: forwards of a slot, all backwards, whole steps."""
    workspace_bytes: int = 0
    """What libraries have set aside for captures, outside of the pool."""

    def joined(self, other: CaptureReport) -> CaptureReport:
        """This one and that of another session, as one."""
        engine = other.engine if self.engine == "none" else self.engine
        parts = self.eager_parts + other.eager_parts
        return CaptureReport(
            engine,
            self.rows + other.rows,
            self.pool_bytes + other.pool_bytes,
            parts,
            self.pools + other.pools,
            self.workspace_bytes + other.workspace_bytes,
        )

    def named_after(self, model: nn.Module) -> CaptureReport:
        """This one with paths of the model as names, where regions are modules of it that were given by themselves.

        So are those of :func:`graphstep.make_graphed_callables`, which knows no model: ``callables[0] (Block)`` becomes
        ``layers.0``. Other names stay, also those of modules that are gone.
        """
        paths = {id(module): path for path, module in model.named_modules()}
        modules = [row.module() if row.module is not None else None for row in self.rows]
        names = [paths.get(id(module), row.name) for row, module in zip(self.rows, modules, strict=True)]
        return replace(self, rows=tuple(replace(row, name=name) for row, name in zip(self.rows, names, strict=True)))

    @property
    def num_recordings(self) -> int:
        """Recordings that exist."""
        return sum(row.num_recordings for row in self.rows)

    @property
    def capture_seconds(self) -> float:
        """Time spent in warmup and capture, in seconds."""
        return sum(row.capture_seconds for row in self.rows)

    def coverage(self) -> tuple[int, int]:
        """Captured regions, and all regions."""
        return sum(row.is_captured for row in self.rows), len(self.rows)

    def render(self) -> Table:
        """A table for a terminal; below it what was not captured and why, and the eager calls with their reasons.

        Regions of one kind and with equal numbers share a row, which holds the numbers of each of them, not their
        sums. Seconds and pool memory are never quite equal: there a row has the smallest and the largest. Columns
        about signatures and microbatches in flight are left out where no region has any.
        """
        title = f"captured: {_count(self.num_recordings, 'recording')}, {self.engine} engine"
        notes = [
            *self._memory_notes(),
            *_part_notes(self.eager_parts),
            *_why_notes(self.rows),
            *_eager_notes(self.rows),
            *_advice_notes(self.rows),
        ]
        table = _ReportTable(Text.assemble((title, "bold"), "\n", self._sums()), notes)
        has_slots = any(row.num_slots or row.num_signatures for row in self.rows)
        table.add_column("region", overflow="fold")
        for heading in _Line.headings(has_slots):
            table.add_column(heading, justify="right", overflow="fold")
        for line, rows in _grouped(self.rows).items():
            names = joined([row.name for row in rows])
            table.add_row(Text(names), *map(Text, line.cells(rows, has_slots)))
        return table

    def __str__(self) -> str:
        """The table as plain text."""
        console = Console(file=io.StringIO(), width=120, color_system=None)
        with console.capture() as captured:
            console.print(self.render())
        return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        num_captured, num_regions = self.coverage()
        return {
            "engine": self.engine,
            "num_recordings": self.num_recordings,
            "capture_seconds": self.capture_seconds,
            "pool_bytes": self.pool_bytes,
            "pools": [pool.to_json() for pool in self.pools],
            "static_bytes": sum(row.static_bytes for row in self.rows),
            "workspace_bytes": self.workspace_bytes,
            "coverage": {"num_captured": num_captured, "num_regions": num_regions},
            "regions": [row.to_json() for row in self.rows],
            "eager_parts": [part.to_json() for part in self.eager_parts],
        }

    def write_html(
        self,
        path: str | Path,
        *,
        model: nn.Module | None = None,
        before: StepMeasurement | None = None,
        after: StepMeasurement | None = None,
        title: str = "CUDA graphs",
    ) -> None:
        """Write one page that needs nothing but a browser: module tree, memory, times, timelines.

        Args:
            path: the file; one of that name is replaced. With the ending ``.json``, the same as plain data.
            model: what the regions belong to, see :meth:`named_after`: without it the tree has the regions only.
            before: what an eager step takes, see :func:`graphstep.coverage.measure_steps`.
            after: the same of a captured one.
            title: heading of the page.

        Raises:
            UserInputError: the file has another ending, or cannot be written.
        """
        # Only now: a report is made in the middle of training, where nothing heavy should be imported.
        from graphstep.coverage import coverage_document, write_document

        named = self.named_after(model) if model is not None else self
        document = coverage_document(named.to_json(), model=model, before=before, after=after, title=title)
        write_document(document, path)

    def _memory_notes(self) -> list[Text]:
        """The pool by those that share it, and what is beside it. Nothing where all of it is one."""
        parts = [f"{pool.name} {_mib([pool.nbytes])} MiB" for pool in self.pools]
        if self.workspace_bytes:
            parts.append(f"workspaces of libraries {_mib([self.workspace_bytes])} MiB")
        return [Text(f"memory: {', '.join(parts)}")] if len(parts) > 1 else []

    def _sums(self) -> str:
        num_captured, num_regions = self.coverage()
        parts = [f"{num_captured} of {_count(num_regions, 'region')}", f"{self.capture_seconds:.2f} s"]
        parts.append(f"pool {_mib([self.pool_bytes])} MiB")
        num_launches = sum(row.num_launches for row in self.rows)
        num_evictions = sum(row.num_evictions for row in self.rows)
        if num_launches:
            num_replays = sum(row.num_replays for row in self.rows)
            parts.append(f"{_count(num_replays, 'replay')} in {_count(num_launches, 'launch', 'es')}")
        if num_evictions:
            parts.append(f"{_count(num_evictions, 'signature')} evicted")
        return ", ".join(parts)


class _ReportTable(Table):
    """A table between texts that may be wider than it is.

    Also for terminals and files that cannot show more than ASCII: a report must not end a run with an error.
    """

    def __init__(self, heading: Text, notes: Sequence[Text]) -> None:
        # No vertical rules: with ten columns they would take a fifth of the width.
        super().__init__(box=box.SIMPLE_HEAD, show_edge=False, padding=0)
        self._heading = heading
        self._notes = [Text(), *notes] if notes else []

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for part in self._parts(console, options):
            if options.ascii_only and isinstance(part, Segment):
                text = part.text.replace("\N{HORIZONTAL ELLIPSIS}", "-").encode("ascii", "replace").decode("ascii")
                yield Segment(text, part.style, part.control)
            else:
                yield part

    def _parts(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self._heading, options)
        yield from super().__rich_console__(console, options)
        for note in self._notes:
            yield from console.render(note, options)


@dataclass(frozen=True, slots=True)
class _Line:
    """What regions must have in common to share a row."""

    kind: str
    name_pattern: str
    is_captured: bool
    num_slots: int
    num_signatures: int
    num_recordings: int
    num_operations: int
    static_bytes: int
    num_replays: int

    @classmethod
    def of(cls, row: RegionStats) -> _Line:
        return cls(
            kind=row.kind,
            name_pattern=re.sub(r"\d+", "#", row.name),
            is_captured=row.is_captured,
            num_slots=row.num_slots,
            num_signatures=row.num_signatures,
            num_recordings=row.num_recordings,
            num_operations=row.num_operations,
            static_bytes=row.static_bytes,
            num_replays=row.num_replays,
        )

    @staticmethod
    def headings(has_slots: bool) -> list[str]:
        slots = ["in\nflight", "signa-\ntures"] if has_slots else []
        costs = ["capture\ns", "pool\nMiB", "static\nMiB"]
        return ["cap-\ntured", *slots, "record-\nings", "opera-\ntions", *costs, "replays"]

    def cells(self, rows: Sequence[RegionStats], has_slots: bool) -> list[str]:
        return [
            "yes" if self.is_captured else "no",
            *([str(self.num_slots), str(self.num_signatures)] if has_slots else []),
            str(self.num_recordings),
            str(self.num_operations),
            _from_to([f"{seconds:.2f}" for seconds in sorted(row.capture_seconds for row in rows)]),
            _mib([row.pool_bytes for row in rows]),
            _mib([self.static_bytes]),
            str(self.num_replays),
        ]


def _grouped(rows: Iterable[RegionStats]) -> dict[_Line, list[RegionStats]]:
    """Regions by the row they share, in the order of their first ones."""
    groups: dict[_Line, list[RegionStats]] = {}
    for row in rows:
        groups.setdefault(_Line.of(row), []).append(row)
    return groups


def _eager_notes(rows: Sequence[RegionStats]) -> list[Text]:
    """Which regions ran eagerly how often, and why."""
    texts: dict[str, list[str]] = {}
    for row in rows:
        text = ", ".join(f"{count} {reason}" for reason, count in row.eager_calls.items())
        last = "; ".join(filter(None, [*row.last_mismatch, row.last_detail]))
        if text or last:
            texts.setdefault(text + (f" (last: {last})" if last else ""), []).append(row.name)
    return [Text(f"eager calls of {_region_names(names, rows)}: {text}") for text, names in texts.items()]


def _part_notes(parts: Sequence[EagerPart]) -> list[Text]:
    """Which parts of layers are no regions, and why."""
    texts: dict[tuple[str, str], list[str]] = {}
    for part in parts:
        # Equal parts of all layers are told together, whatever lies between them.
        texts.setdefault((part.name.rpartition(".")[2], part.why), []).append(part.name)
    return [Text(f"eager, {joined(names)}: {why}") for (_, why), names in texts.items()]


def _why_notes(rows: Sequence[RegionStats]) -> list[Text]:
    """Which regions have no recordings, and why."""
    texts: dict[str, list[str]] = {}
    for row in rows:
        if row.why_not_captured:
            texts.setdefault(row.why_not_captured, []).append(row.name)
    return [Text(f"not captured, {_region_names(names, rows)}: {text}") for text, names in texts.items()]


def _advice_notes(rows: Sequence[RegionStats]) -> list[Text]:
    """What to do about the reasons that came up, once for each."""
    reasons = dict.fromkeys(str(reason) for row in rows for reason in row.eager_calls if reason not in WITHOUT_ADVICE)
    return [Text(f"{reason}: {advice(reason)}", "dim") for reason in reasons if advice(reason)]


def _region_names(names: Sequence[str], rows: Sequence[RegionStats]) -> str:
    return "all regions" if len(names) == len(rows) > 1 else joined(names)


def joined(names: Iterable[str]) -> str:
    """``layers.0 … layers.11, layers.13``: a run of names that count up in one number is told by its ends."""
    from graphstep.coverage.tree import WHOLE_MODEL

    runs: list[list[str]] = []
    for name in (each or WHOLE_MODEL for each in names):
        place = _counted(runs[-1][-1], name) if runs else None
        if place is not None and (len(runs[-1]) == 1 or place == _counted(*runs[-1][-2:])):
            runs[-1].append(name)
        else:
            runs.append([name])
    return ", ".join(_from_to(run, " … ") if len(run) > 2 else ", ".join(run) for run in runs)


def _counted(before: str, after: str) -> int | None:
    """Which number of a name is one higher in the next name; None if anything else differs."""
    old, new = (re.split(r"(\d+)", name) for name in (before, after))
    places = [place for place, pair in enumerate(zip(old, new, strict=False)) if pair[0] != pair[1]]
    if len(old) != len(new) or len(places) != 1 or places[0] % 2 == 0:
        return None
    return places[0] if int(new[places[0]]) == int(old[places[0]]) + 1 else None


def _from_to(texts: Sequence[str], between: str = " to ") -> str:
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]}{between}{texts[-1]}"


def _mib(sizes: Iterable[int]) -> str:
    return _from_to([f"{size / MIB:.1f}" for size in sorted(sizes)])


def _count(number: int, noun: str, ending: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else ending}"
