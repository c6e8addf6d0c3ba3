"""A trace that chrome://tracing and Perfetto open: launches on the host, kernels on the device, before and after.

Source: "Trace Event Format" of the Chromium project: complete events (``X``), metadata (``M``), flows (``s``, ``f``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from graphstep.coverage.timeline import Timeline

_COLOURS: Mapping[str, str] = {
    "graph launch": "good",
    "launch": "bad",
    "transfer": "terrible",
    "operation": "thread_state_running",
    "kernel": "thread_state_runnable",
    "copy": "thread_state_iowait",
}
"""Reserved colour names of the viewer."""


def chrome_trace(timelines: Mapping[str, Timeline | None]) -> dict[str, Any]:
    """Return the trace as plain data.

    Each timeline gets two processes, host and device; an arrow leads from a launch to the first thing that it started.

    Args:
        timelines: by name, such as ``eager`` and ``graphed``; None, of steps that were not profiled, is left out.
    """
    events: list[dict[str, Any]] = []
    for number, (name, timeline) in enumerate(timelines.items()):
        if timeline is not None:
            events += _events(timeline, name, first_process=2 * number + 1)
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _events(timeline: Timeline, name: str, *, first_process: int) -> Iterator[dict[str, Any]]:
    processes = {False: first_process, True: first_process + 1}
    for is_device, process in processes.items():
        if any(track.is_device == is_device for track in timeline.tracks):
            yield _named("process_name", process, 0, f"{name}: {'device' if is_device else 'host'}")
    host = {span.correlation for span in timeline.spans(is_device=False)} - {None}
    first: dict[int | None, float] = {}
    for span in timeline.spans(is_device=True):
        first[span.correlation] = min(span.start_us, first.get(span.correlation, span.start_us))
    for thread, track in enumerate(timeline.tracks, 1):
        process = processes[track.is_device]
        yield _named("thread_name", process, thread, track.name)
        for span in track.spans:
            place = {"pid": process, "tid": thread}
            yield {
                "ph": "X",
                "name": span.name,
                "cat": span.category,
                "ts": span.start_us,
                "dur": span.duration_us,
                "cname": _COLOURS[span.category],
                **place,
                "args": {} if span.correlation is None else {"correlation": span.correlation},
            }
            if span.correlation in host and span.correlation in first:
                flow = {"name": "launch", "cat": "launch", "id": f"{first_process}.{span.correlation}", **place}
                if not track.is_device:
                    yield {"ph": "s", "ts": span.start_us, **flow}
                elif span.start_us == first[span.correlation]:
                    yield {"ph": "f", "bp": "e", "ts": span.start_us, **flow}


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
