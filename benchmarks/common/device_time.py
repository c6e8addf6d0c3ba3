"""What the GPU and the driver did in a step, from the profiler's trace.

The trace of ``torch.profiler`` (Kineto over CUPTI) is read in its Chrome format, because that names the category of
every event: kernels, copies and memsets on the device, calls of the CUDA runtime and driver on the host. Ranges that
were marked with names are drawn on the device too, in a category of their own; they are left out, as they would count
twice. The nodes of a replayed graph appear as kernels like any other.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from common.clocks import Run, synchronize

KERNEL, COPY, MEMSET = "kernel", "gpu_memcpy", "gpu_memset"
_DEVICE_CATEGORIES = (KERNEL, COPY, MEMSET)
_HOST_CATEGORIES = ("cuda_runtime", "cuda_driver")
_LAUNCH = re.compile(r"(cuda|cu)(Launch|GraphLaunch)")
_TRANSFER = re.compile(r"(cuda|cu)(Memcpy|Memset)")
_NAME_LENGTH = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceTime:
    """Averages over the profiled steps, for one step. Times in milliseconds."""

    num_steps: int
    sum_ms: float
    """Kernels, copies and memsets, added up: `kernel_ms + copy_ms + memset_ms`."""
    busy_ms: float
    """Time in which at least one of them ran: less than the sum where they overlap."""
    kernel_ms: float
    copy_ms: float
    memset_ms: float
    num_kernels: float
    num_copies: float
    num_memsets: float
    num_launches: float
    """Launches of kernels and graphs by the host."""
    num_transfers: float
    """Copies and memsets that the host asked for one by one."""
    host_calls: Mapping[str, float] = field(default_factory=dict)
    """The launches and transfers by the name of the call."""
    top_kernels: tuple[Mapping[str, Any], ...] = ()
    """The kernels that take longest: name, ms, count."""


def profile_steps(run: Run, device: torch.device, *, num_steps: int) -> DeviceTime | None:
    """Profile steps issued back to back.

    Args:
        run: runs a step; warm.
        device: a CUDA device; on the CPU there is nothing to see.
        num_steps: steps to average over.

    Returns:
        None on the CPU.

    Raises:
        RuntimeError: the trace shows no kernel: the profiler does not work here.
    """
    if device.type != "cuda":
        return None
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for index in range(num_steps):
            run(index)
        synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)["traceEvents"]
    found = read_trace(events, num_steps=num_steps)
    if found.num_kernels == 0:
        raise RuntimeError("the profiler's trace shows no kernel")
    return found


def start_profiler(device: torch.device) -> None:
    """Profile next to nothing, so that the profiler is set up before graphs that it will see are captured."""
    if device.type == "cuda":
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]):
            torch.zeros(8, device=device).add_(1)
            synchronize(device)


def read_trace(events: Iterable[Mapping[str, Any]], *, num_steps: int, num_top: int = 8) -> DeviceTime:
    """Add up the events of a trace in Chrome's format (times in microseconds).

    Args:
        events: its ``traceEvents``.
        num_steps: steps that the trace covers.
        num_top: kernels to list by name.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    on_device = [event for event in complete if event.get("cat") in _DEVICE_CATEGORIES]
    total_us: dict[str, float] = defaultdict(float)
    kernel_us: dict[str, float] = defaultdict(float)
    count: Counter[str] = Counter()
    kernel_count: Counter[str] = Counter()
    for event in on_device:
        total_us[event["cat"]] += event["dur"]
        count[event["cat"]] += 1
        if event["cat"] == KERNEL:
            kernel_us[event["name"]] += event["dur"]
            kernel_count[event["name"]] += 1
    calls = Counter(_outermost_calls(complete))
    busy_us = _covered((event["ts"], event["ts"] + event["dur"]) for event in on_device)
    longest = sorted(kernel_us, key=lambda name: -kernel_us[name])[:num_top]
    return DeviceTime(
        num_steps=num_steps,
        sum_ms=sum(total_us.values()) / num_steps / 1e3,
        busy_ms=busy_us / num_steps / 1e3,
        kernel_ms=total_us[KERNEL] / num_steps / 1e3,
        copy_ms=total_us[COPY] / num_steps / 1e3,
        memset_ms=total_us[MEMSET] / num_steps / 1e3,
        num_kernels=count[KERNEL] / num_steps,
        num_copies=count[COPY] / num_steps,
        num_memsets=count[MEMSET] / num_steps,
        num_launches=sum(n for name, n in calls.items() if _LAUNCH.match(name)) / num_steps,
        num_transfers=sum(n for name, n in calls.items() if _TRANSFER.match(name)) / num_steps,
        host_calls={name: n / num_steps for name, n in sorted(calls.items())},
        top_kernels=tuple(
            {
                "name": name[:_NAME_LENGTH],
                "ms": kernel_us[name] / num_steps / 1e3,
                "count": kernel_count[name] / num_steps,
            }
            for name in longest
        ),
    )


def _outermost_calls(events: Iterable[Mapping[str, Any]]) -> Iterable[str]:
    """Names of launches and transfers, without the driver's call inside a call of the runtime."""
    calls = [
        event
        for event in events
        if event.get("cat") in _HOST_CATEGORIES and (_LAUNCH.match(event["name"]) or _TRANSFER.match(event["name"]))
    ]
    calls.sort(key=lambda event: (event["ts"], -event["dur"]))
    ends: dict[tuple[Any, Any], float] = {}
    for event in calls:
        thread = (event.get("pid"), event.get("tid"))
        end = event["ts"] + event["dur"]
        if end > ends.get(thread, float("-inf")):
            ends[thread] = end
            yield event["name"]


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
