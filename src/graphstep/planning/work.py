"""The work of a step in its order: what the host does, what the device does, which part it belongs to.

On a GPU it is read from a profile of the step, in which marks say where parts begin; on the CPU it is a list of counted
operations.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.profiler import record_function

from graphstep.coverage import StepProfiler
from graphstep.coverage.timeline import DEVICE_CATEGORIES, HOST_CATEGORIES, LAUNCH, TRANSFER
from graphstep.planning.operations import StepLog
from graphstep.planning.scopes import OUTSIDE, Scopes

_STEP: Final = "graphstep step"
_MARK: Final = "graphstep part "
_WAITS: Final = re.compile(r"(cuda|cu)(Stream|Device|Event|Ctx)Synchronize$|cudaMemcpy$|cuMemcpy[A-Za-z]*_v2$")


@dataclass(frozen=True, slots=True)
class Work:
    """One launch, or one wait of the host for the device."""

    scope: str
    is_backward: bool
    host_us: float
    """What the host does from the launch before to the end of this one."""
    device_us: float = 0.0
    """What it starts takes on the device."""
    num_nodes: int = 1
    """Kernels, copies and memsets that it starts."""
    waits: bool = False
    """The host waits here until the device has done everything before."""
    microbatch: int = 0


class Marker:
    """Marks in the trace of the profiler where the part that runs changes."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def change(self, scope: str, is_backward: bool, microbatch: int) -> None:
        """See ``on_change`` of :class:`Scopes`."""
        number = self.numbers.setdefault(scope, len(self.numbers))
        with record_function(f"{_MARK}{number} {int(is_backward)} {microbatch}"):
            pass


def profile_work(run: Callable[[Scopes], Any], device: torch.device) -> tuple[Work, ...]:
    """Profile a step on a GPU; one more before it sets the profiler up.

    Args:
        run: runs a whole step, warm, while the scopes that it is given are installed.
        device: a GPU.
    """
    marker = Marker()
    scopes = Scopes(on_change=marker.change)
    with StepProfiler(device) as profiler:
        profiler.start()
        for _ in range(2):
            with record_function(_STEP):
                pass
            marker.change(OUTSIDE, False, 0)
            run(scopes)
            torch.cuda.synchronize(device)
        events = profiler.stop_and_read()
    return read_work(events, {number: scope for scope, number in marker.numbers.items()})


def read_work(events: Iterable[Mapping[str, Any]], scopes: Mapping[int, str]) -> tuple[Work, ...]:
    """The launches of the last marked step, in their order.

    Args:
        events: ``traceEvents`` of the profiler.
        scopes: names of the parts by the number in their marks.
    """
    complete = [event for event in events if event.get("ph") == "X" and "ts" in event]
    marked = [event for event in complete if str(event["name"]) == _STEP and event.get("cat") == "user_annotation"]
    start = max((float(event["ts"]) for event in marked), default=0.0)
    marks = sorted(
        (float(event["ts"]), str(event["name"]))
        for event in complete
        if str(event["name"]).startswith(_MARK) and event.get("cat") == "user_annotation" and event["ts"] >= start
    )
    times = [time for time, _ in marks]
    device_us: dict[Any, float] = defaultdict(float)
    num_nodes: dict[Any, int] = defaultdict(int)
    for event in complete:
        if event.get("cat") in DEVICE_CATEGORIES:
            correlation = _correlation(event)
            device_us[correlation] += float(event["dur"])
            num_nodes[correlation] += 1
    calls = sorted((e for e in complete if _is_call(e) and e["ts"] >= start), key=lambda e: (e["ts"], -e["dur"]))
    found: list[Work] = []
    until = start
    for event in calls:
        end = float(event["ts"]) + float(event["dur"])
        if end <= until:  # The driver's call inside one of the runtime.
            continue
        waits = _WAITS.search(str(event["name"])) is not None
        # What a wait takes depends on the device: it is worked out from the rest.
        host_us = (float(event["ts"]) if waits else end) - until
        scope, is_backward, microbatch = _at(marks, times, float(event["ts"]), scopes)
        correlation = _correlation(event)
        found.append(
            Work(
                scope,
                is_backward,
                max(0.0, host_us),
                device_us.get(correlation, 0.0),
                num_nodes.get(correlation, 0),
                waits,
                microbatch,
            )
        )
        until = end
    while found and found[-1].waits:  # Those at the end are the measurement's own.
        found.pop()
    return tuple(found)


def counted_work(log: StepLog, eager_operation_us: float) -> tuple[Work, ...]:
    """The operations of a step as if each were launched, at the host time that one was measured to take."""
    return tuple(
        Work(each.scope, each.is_backward, eager_operation_us, microbatch=each.microbatch) for each in log.operations
    )


def _is_call(event: Mapping[str, Any]) -> bool:
    name = str(event["name"])
    return event.get("cat") in HOST_CATEGORIES and bool(
        LAUNCH.match(name) or TRANSFER.match(name) or _WAITS.search(name)
    )


def _at(
    marks: Sequence[tuple[float, str]], times: Sequence[float], time: float, scopes: Mapping[int, str]
) -> tuple[str, bool, int]:
    place = bisect_right(times, time) - 1
    if place < 0:
        return OUTSIDE, False, 0
    number, is_backward, microbatch = marks[place][1].removeprefix(_MARK).split()
    return scopes.get(int(number), OUTSIDE), is_backward == "1", int(microbatch)


def _correlation(event: Mapping[str, Any]) -> Any:
    return (event.get("args") or {}).get("correlation")
