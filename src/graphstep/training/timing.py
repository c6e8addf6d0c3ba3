"""Step times without synchronising each step, and peak memory."""

from __future__ import annotations

import resource
import statistics
import sys
import time
from collections.abc import Sequence

import torch


class StepTimer:
    """Milliseconds between :meth:`start` and :meth:`stop` of each step, read only when :meth:`drain` is called.

    On CUDA each end of a step is an event on the current stream, so a step's time is what the device needed, idle gaps
    included; on the CPU it is wall-clock time. A step that was started and not stopped is dropped.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._started_at = 0.0
        self._start_event: torch.cuda.Event | None = None
        self._wall_ms: list[float] = []
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._free: list[torch.cuda.Event] = []

    def start(self) -> None:
        """Mark the start of a step."""
        if self._is_cuda:
            self._start_event = self._mark()
        else:
            self._started_at = time.perf_counter()

    def stop(self) -> None:
        """Mark the end of the step that was started last."""
        if not self._is_cuda:
            self._wall_ms.append((time.perf_counter() - self._started_at) * 1e3)
        elif self._start_event is not None:
            self._events.append((self._start_event, self._mark()))
            self._start_event = None

    def drain(self) -> list[float]:
        """Return the times of all steps since the last call; waits for the device to finish the last one."""
        if not self._is_cuda:
            times, self._wall_ms = self._wall_ms, []
            return times
        if not self._events:
            return []
        self._events[-1][1].synchronize()
        times = [start.elapsed_time(end) for start, end in self._events]
        self._free.extend(event for pair in self._events for event in pair)
        self._events.clear()
        return times

    def _mark(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def median_ms(times_ms: Sequence[float]) -> float | None:
    """Return the median, or None when nothing was timed."""
    return statistics.median(times_ms) if times_ms else None


def restart_peak_memory(device: torch.device) -> None:
    """Let :func:`peak_memory_bytes` count from now; the resident set of the CPU cannot be restarted."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak: memory allocated by torch on a CUDA device, the process's resident set on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
