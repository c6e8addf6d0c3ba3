"""What the host launched and what the device ran, on one time axis, from the profiler's trace.

The trace of ``torch.profiler`` is read in its Chrome format, because that names the category of every event: calls of
the CUDA runtime and driver on the host, kernels, copies and memsets on the device. The nodes of a replayed graph appear
as kernels like any other. On the CPU there is no device: the operations themselves are shown, on the host.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

DEVICE_CATEGORIES: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
HOST_CATEGORIES: Final = frozenset({"cuda_runtime", "cuda_driver"})
OPERATION: Final = "cpu_op"
GRAPH_LAUNCH: Final = re.compile(r"(cuda|cu)GraphLaunch")
LAUNCH: Final = re.compile(r"(cuda|cu)(Launch|GraphLaunch)")
TRANSFER: Final = re.compile(r"(cuda|cu)(Memcpy|Memset)")
_NAME_LENGTH: Final = 160


@dataclass(frozen=True, slots=True)
class Span:
    """One event of known length. Times in microseconds from the start of the timeline."""

    name: str
    start_us: float
    duration_us: float
    category: str
    """``launch``, ``graph launch``, ``transfer`` or ``operation`` on the host; ``kernel`` or ``copy`` on the device."""
    correlation: int | None = None
    """Same number for a launch and for what it started on the device."""

    @property
    def end_us(self) -> float:
        """Where it ends."""
        return self.start_us + self.duration_us


@dataclass(frozen=True, slots=True)
class Track:
    """Events of one thread of the host or one stream of the device."""

    name: str
    is_device: bool
    spans: tuple[Span, ...]
    """In the order of their start."""


@dataclass(frozen=True, slots=True)
class Timeline:
    """Some profiled steps. The profiler slows the host down: compare times of steps that were not profiled."""

    tracks: tuple[Track, ...]
    num_steps: int

    def spans(self, *, is_device: bool) -> Iterator[Span]:
        """All of the device, or all of the host."""
        return (span for track in self.tracks if track.is_device == is_device for span in track.spans)

    @property
    def has_device(self) -> bool:
        """True if there was a device to see."""
        return any(track.is_device for track in self.tracks)

    @property
    def busy_ms(self) -> float | None:
        """Time of a step in which at least one kernel or copy ran; None without a device."""
        if not self.has_device:
            return None
        spans = [(span.start_us, span.end_us) for span in self.spans(is_device=True)]
        return _covered_us(spans) / 1e3 / self.num_steps

    @property
    def num_launches(self) -> float:
        """Launches of a step: of kernels and graphs by the host; without a device, operations."""
        names = ("launch", "graph launch") if self.has_device else ("operation",)
        return sum(span.category in names for span in self.spans(is_device=False)) / self.num_steps

    @property
    def num_graph_launches(self) -> float:
        """Those of a step that launch a graph."""
        return sum(span.category == "graph launch" for span in self.spans(is_device=False)) / self.num_steps

    @property
    def num_transfers(self) -> float:
        """Copies and memsets of a step that the host asked for one by one."""
        return sum(span.category == "transfer" for span in self.spans(is_device=False)) / self.num_steps

    @property
    def num_kernels(self) -> float | None:
        """Kernels of a step; None without a device."""
        if not self.has_device:
            return None
        return sum(span.category == "kernel" for span in self.spans(is_device=True)) / self.num_steps

    def longest(self, number: int = 8) -> list[dict[str, Any]]:
        """Names that take most time a step: kernels, or operations without a device. Fields: name, ms, count."""
        total_us: dict[str, float] = defaultdict(float)
        count: dict[str, int] = defaultdict(int)
        for span in self.spans(is_device=self.has_device):
            total_us[span.name] += span.duration_us
            count[span.name] += 1
        chosen = sorted(total_us, key=lambda name: (-total_us[name], name))[:number]
        return [
            {"name": name, "ms": total_us[name] / 1e3 / self.num_steps, "count": count[name] / self.num_steps}
            for name in chosen
        ]

    def to_json(self) -> dict[str, Any]:
        """The same as plain data: every name once, spans as start, duration, name, category, correlation (or -1)."""
        names: dict[str, int] = {}
        categories: dict[str, int] = {}
        tracks = [
            {
                "name": track.name,
                "is_device": track.is_device,
                "spans": [
                    [
                        round(span.start_us, 3),
                        round(span.duration_us, 3),
                        names.setdefault(span.name, len(names)),
                        categories.setdefault(span.category, len(categories)),
                        -1 if span.correlation is None else span.correlation,
                    ]
                    for span in track.spans
                ],
            }
            for track in self.tracks
        ]
        return {
            "num_steps": self.num_steps,
            "has_device": self.has_device,
            "busy_ms": self.busy_ms,
            "num_launches": self.num_launches,
            "num_graph_launches": self.num_graph_launches,
            "num_kernels": self.num_kernels,
            "longest": self.longest(),
            "names": list(names),
            "categories": list(categories),
            "tracks": tracks,
        }


def read_timeline(events: Iterable[Mapping[str, Any]], *, num_steps: int) -> Timeline:
    """Take the launches and the device's work out of a trace.

    Args:
        events: its ``traceEvents``; those of other kinds are left out.
        num_steps: steps that the trace covers.
    """
    complete = [event for event in events if event.get("ph") == "X" and "ts" in event]
    on_device = [event for event in complete if event.get("cat") in DEVICE_CATEGORIES]
    on_host = list(_outermost(event for event in complete if _host_category(event) is not None))
    if not on_device:
        on_host = list(_outermost(event for event in complete if _is_operation(event)))
    if not on_host and not on_device:
        return Timeline((), num_steps)
    start = min(float(event["ts"]) for event in (*on_host, *on_device))
    host = _tracks(on_host, "host thread", start, is_device=False)
    device = _tracks(on_device, "device stream", start, is_device=True)
    return Timeline((*host, *device), num_steps)


def _tracks(events: Sequence[Mapping[str, Any]], label: str, start: float, *, is_device: bool) -> list[Track]:
    groups: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in events:
        # Copies and kernels of a stream share its track, also where the profiler numbers them apart.
        groups[_stream_of(event) if is_device else event.get("tid")].append(event)
    ordered = sorted(groups.values(), key=lambda group: min(event["ts"] for event in group))
    return [
        Track(f"{label} {number}", is_device, tuple(_span(event, start) for event in sorted(group, key=_when)))
        for number, group in enumerate(ordered, 1)
    ]


def _span(event: Mapping[str, Any], start: float) -> Span:
    correlation = (event.get("args") or {}).get("correlation")
    category = event.get("cat")
    kind = ("kernel" if category == "kernel" else "copy") if category in DEVICE_CATEGORIES else _host_category(event)
    return Span(
        name=str(event["name"])[:_NAME_LENGTH],
        start_us=float(event["ts"]) - start,
        duration_us=float(event.get("dur", 0.0)),
        category=kind or "operation",
        correlation=int(correlation) if isinstance(correlation, int) else None,
    )


def _host_category(event: Mapping[str, Any]) -> str | None:
    if event.get("cat") not in HOST_CATEGORIES:
        return None
    name = str(event["name"])
    if GRAPH_LAUNCH.match(name):
        return "graph launch"
    if LAUNCH.match(name):
        return "launch"
    return "transfer" if TRANSFER.match(name) else None


def _is_operation(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == OPERATION and "::" in str(event["name"]) and "evaluate_function" not in event["name"]


def _outermost(events: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Without those inside another one of the same thread: a call of the driver inside one of the runtime."""
    ends: dict[tuple[Any, Any], float] = {}
    for event in sorted(events, key=_when):
        thread = (event.get("pid"), event.get("tid"))
        end = float(event["ts"]) + float(event.get("dur", 0.0))
        if end > ends.get(thread, float("-inf")):
            ends[thread] = end
            yield event


def _when(event: Mapping[str, Any]) -> tuple[float, float]:
    return float(event["ts"]), -float(event.get("dur", 0.0))


def _stream_of(event: Mapping[str, Any]) -> Any:
    return (event.get("args") or {}).get("stream", event.get("tid"))


def _covered_us(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
