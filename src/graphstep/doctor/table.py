"""Findings as a table for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from graphstep.doctor.diagnosis import Diagnosis
from graphstep.doctor.findings import Finding, Severity

_STYLES: Final[Mapping[Severity, str]] = MappingProxyType(
    {Severity.error: "bold red", Severity.warning: "yellow", Severity.note: "cyan"}
)


def print_diagnosis(diagnosis: Diagnosis, console: Console) -> None:
    """Print the findings, the worst first, and what was looked at."""
    if diagnosis.findings:
        console.print(_table(diagnosis))
    console.print(Text(_summary(diagnosis)))
    if diagnosis.written_buffers:
        names = ", ".join(diagnosis.written_buffers[:8])
        more = f" and {len(diagnosis.written_buffers) - 8} more" if len(diagnosis.written_buffers) > 8 else ""
        console.print(Text(f"Buffers that each run writes, and each replay too: {names}{more}"))
    if diagnosis.findings:
        console.print(Text("graphstep doctor --codes explains every code, with a broken and a mended program"))


def _table(diagnosis: Diagnosis) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_lines=True)
    table.add_column("code", no_wrap=True)
    table.add_column("where", overflow="fold", ratio=2)
    table.add_column("what happens there", ratio=3)
    table.add_column("fix", ratio=3)
    for finding in diagnosis.findings:
        table.add_row(*_row(finding))
    return table


def _row(finding: Finding) -> Iterator[RenderableType]:
    style = _STYLES[finding.severity]
    yield Text.assemble((finding.code, style), "\n", (str(finding.severity), style))
    yield Text.assemble(_place(finding), "\n", (finding.where.text, "dim"))
    times = f", {finding.num_times} times" if finding.num_times > 1 else ""
    part = f"{finding.part}: " if finding.part else ""
    detail = f" ({finding.detail})" if finding.detail else ""
    yield Text.assemble(
        f"{finding.kind.title}\n", (f"{part}{finding.operation}{detail}{times}\n", "dim"), (str(finding.effect), style)
    )
    yield Text(finding.fix)


def _place(finding: Finding) -> str:
    path = Path(finding.where.file)
    here = Path.cwd()
    name = str(path.relative_to(here)) if path.is_relative_to(here) else finding.where.file
    return f"{name}:{finding.where.line}" if finding.where.line else name


def _summary(diagnosis: Diagnosis) -> str:
    counts = diagnosis.counts()
    found = ", ".join(f"{number} {severity}{'' if number == 1 else 's'}" for severity, number in counts.items())
    return (
        f"{diagnosis.target}: {found} in {diagnosis.num_runs} runs of {diagnosis.num_operations} operations "
        f"({diagnosis.seconds:.1f} s)"
    )
