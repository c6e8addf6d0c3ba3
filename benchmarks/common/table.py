"""The results for a reader: one table, and what has to be said beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.check import Agreement
from common.clocks import Spread
from common.record import ArmRecord

_DRIFT = 0.02
"""Medians of two passes that differ by more than this share are pointed out."""


def render(records: Sequence[ArmRecord], *, title: str) -> Table:
    """Return the table; times in milliseconds a step, memory in MiB.

    Args:
        records: of all arms; eager, if it is among them, is what memory is compared with.
        title: model and machine.
    """
    table = Table(title=title, title_justify="left")
    table.add_column("arm")
    for name in (
        "step ms\np10-p90",
        "back to\nback ms",
        "host\nms",
        "device ms\nkernels",
        "step/\ndevice",
        "b2b/\ndevice",
        "launches\ncopies",
        "peak MiB\nreserved",
        "capture s\nready s",
        "= eager: normal\ndeterministic",
    ):
        table.add_column(name, justify="right")
    eager_peak = next((r.memory("peak_allocated") for r in records if r.name == "eager"), None)
    for record in records:
        if record.step is None:
            table.add_row(record.name, record.status)
        else:
            table.add_row(Text(record.name), *(Text(cell) for cell in _cells(record, eager_peak)))
    return table


def remarks(records: Sequence[ArmRecord], results: dict[str, Any]) -> Iterator[str]:
    """Yield what the numbers alone do not say."""
    if results["machine"]["device"] == "cpu":
        yield "CPU: graphs are those of the tape engine, the reference for semantics. Its times say nothing about CUDA."
    for record in records:
        if record.status != "ok":
            yield f"{record.name}: {record.status}: {record.reason}"
        yield from _arm_remarks(record)
    eager = next((record for record in records if record.name == "eager"), None)
    if eager is not None and eager.normal is not None and not eager.normal.is_equal:
        yield "eager differs from itself: some kernels are not deterministic; look at the deterministic comparison."
    for name in results["kernels_without_deterministic_variant"]:
        yield f"not deterministic even when asked: {name}"


def _arm_remarks(record: ArmRecord) -> Iterator[str]:
    medians = [Spread.of(p.times.step).median for p in record.passes]
    if medians and max(medians) > (1 + _DRIFT) * min(medians):
        yield f"{record.name}: passes differ: " + ", ".join(f"{median:.3f} ms" for median in medians)
    for name, agreement in (("", record.normal), ("deterministic, ", record.deterministic)):
        if agreement is not None and agreement.worst_parameter:
            error = f"{agreement.largest_gradient_error:.2e}"
            yield f"{record.name}: {name}largest relative error of a gradient {error} ({agreement.worst_parameter})"
    left = record.memory("not_freed")
    if left is not None and left > 2**20:
        yield f"{record.name}: {left / 2**20:.1f} MiB were not given back"


def _cells(record: ArmRecord, eager_peak: int | None) -> Iterator[str]:
    step, device = record.step, record.device_time
    yield "-" if step is None else f"{step.median:.3f}\n{step.p10:.3f}-{step.p90:.3f}"
    yield _median(record.back_to_back)
    yield _median(record.launch)
    yield "-" if device is None else f"{device.sum_ms:.3f}\n{device.num_kernels:.0f}"
    yield _ratio(record.over_device_time(step))
    yield _ratio(record.over_device_time(record.back_to_back))
    yield "-" if device is None else f"{device.num_launches:.0f}\n{device.num_transfers:.0f}"
    yield _memory(record, eager_peak)
    first = record.passes[0]
    capture = "-" if first.capture_seconds is None else f"{first.capture_seconds:.2f}"
    yield f"{capture}\n{first.ready_seconds:.2f}"
    yield f"{_verdict(record.normal)}\n{_verdict(record.deterministic)}"


def _memory(record: ArmRecord, eager_peak: int | None) -> str:
    peak, reserved = record.memory("peak_allocated"), record.memory("peak_reserved")
    if peak is None or reserved is None:
        return "-"
    share = f" ({peak / eager_peak:.2f}x)" if eager_peak and record.name != "eager" else ""
    return f"{peak / 2**20:.0f}{share}\n{reserved / 2**20:.0f}"


def _median(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.median:.3f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _verdict(agreement: Agreement | None) -> str:
    if agreement is None:
        return "not compared"
    if agreement.is_equal:
        return "bit for bit"
    return f"within {max(agreement.largest_loss_error, agreement.largest_gradient_error):.1e}"


def wide_console(width: int) -> Console:
    """Standard output; where that is no terminal, wide enough for a table."""
    console = Console()
    return console if console.is_terminal else Console(width=width)
