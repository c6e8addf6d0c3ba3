"""Step times, memory and their spread."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

Run = Callable[[int], object]
"""Runs the step with this number; does not wait for the device."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and spread of several measurements, in their unit."""

    median: float
    p10: float
    p90: float
    smallest: float
    largest: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value; percentiles are interpolated."""
        deciles = statistics.quantiles(values, n=10, method="inclusive") if len(values) > 1 else [values[0]] * 9
        return cls(statistics.median(values), deciles[0], deciles[8], min(values), max(values), len(values))


@dataclass(slots=True)
class StepTimes:
    """Times of one arm in one pass, in milliseconds a step."""

    step: list[float] = field(default_factory=list)
    """One step at a time, the device idle before it: from before the call until the device has finished."""
    launch: list[float] = field(default_factory=list)
    """Of the same steps, until the call returned: what the host needs."""
    back_to_back: list[float] = field(default_factory=list)
    """Steps issued without waiting, one wait at the end: one value a round."""


ROUND_MS = 250.0
"""Least length of a round of steps on CUDA. The device waits for the host once a round, which must not count."""
LEAST_STEPS = 20
"""Single steps that are timed however long they take."""


def measure_steps(
    run: Run, device: torch.device, *, num_steps: int, enough_ms: float | None = None, num_rounds: int = 5
) -> StepTimes:
    """Time single steps, then rounds of steps issued back to back.

    On CUDA between two events of the current stream, on the CPU by the wall clock.

    Args:
        run: runs a step; warm.
        device: where it runs.
        num_steps: single steps, and on the CPU about as many in rounds.
        enough_ms: once single steps have taken this time together (and there are ``LEAST_STEPS``), no more follow.
        num_rounds: on CUDA each takes at least ``ROUND_MS``.
    """
    times = StepTimes()
    watch = _CudaWatch(device) if device.type == "cuda" else _WallWatch()
    for index in range(num_steps):
        if enough_ms is not None and index >= LEAST_STEPS and sum(times.step) >= enough_ms:
            break
        watch.start()
        before = time.perf_counter()
        run(index)
        times.launch.append((time.perf_counter() - before) * 1e3)
        times.step.append(watch.stop_ms())

    def round_ms(num_steps: int) -> float:
        watch.start()
        for index in range(num_steps):
            run(index)
        return watch.stop_ms()

    steps_per_round = max(1, num_steps // num_rounds)
    if device.type == "cuda":
        steps_per_round = math.ceil(1.1 * ROUND_MS / statistics.median(times.step))
        # Steps without gaps between them are shorter than single ones: rounds that do not count tell how many it takes.
        while (took_ms := round_ms(steps_per_round)) < ROUND_MS:
            steps_per_round = math.ceil(1.1 * ROUND_MS * steps_per_round / took_ms)
    for _ in range(min(num_rounds, num_steps)):
        times.back_to_back.append(round_ms(steps_per_round) / steps_per_round)
    return times


class _WallWatch:
    def __init__(self) -> None:
        self._started = 0.0

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop_ms(self) -> float:
        return (time.perf_counter() - self._started) * 1e3


class _CudaWatch:
    """Milliseconds between two events. Both ends wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first = torch.cuda.Event(enable_timing=True)
        self._last = torch.cuda.Event(enable_timing=True)

    def start(self) -> None:
        torch.cuda.synchronize(self._device)
        self._first.record()

    def stop_ms(self) -> float:
        self._last.record()
        self._last.synchronize()
        return float(self._first.elapsed_time(self._last))


@dataclass(slots=True)
class MemoryUse:
    """Device memory of one arm in one pass, in bytes, over what lay there before. None on the CPU."""

    allocated_before: int | None = None
    """Allocated before the arm was built: the data. Not part of the other numbers."""
    peak_allocated: int | None = None
    """Peak over build, capture and steps, of what torch handed out."""
    peak_reserved: int | None = None
    """The same of what torch took from the driver."""
    steady_allocated: int | None = None
    """Peak of steps after the arm was built."""
    steady_reserved: int | None = None
    """The same of what torch held from the driver."""
    driver_used: int | None = None
    """Growth of the device's used memory at the end: also what graphs, libraries and modules took from the driver."""
    not_freed: int | None = None
    """Still allocated after the arm was closed."""


class MemoryMeter:
    """Fills a :class:`MemoryUse`: made before the arm, when memory is free, then told how far the arm has come.

    Order: ``built()``, ``end()`` before the arm is closed, ``closed()`` after it.
    """

    def __init__(self, device: torch.device) -> None:
        self.use = MemoryUse()
        self._device = device
        self._is_cuda = device.type == "cuda"
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats(device)
            self._allocated = self.use.allocated_before = torch.cuda.memory_allocated(device)
            self._reserved = torch.cuda.memory_reserved(device)
            self._driver_free = torch.cuda.mem_get_info(device)[0]
            self._peaks_of_build = (0, 0)

    def built(self) -> None:
        """Note the peak of building; start that of steps."""
        if self._is_cuda:
            self._peaks_of_build = self._peaks()
            torch.cuda.reset_peak_memory_stats(self._device)

    def end(self) -> None:
        """Note the peaks, before the arm is closed."""
        if self._is_cuda:
            allocated, reserved = self._peaks()
            self.use.steady_allocated, self.use.steady_reserved = allocated, reserved
            self.use.peak_allocated = max(allocated, self._peaks_of_build[0])
            self.use.peak_reserved = max(reserved, self._peaks_of_build[1])
            self.use.driver_used = self._driver_free - torch.cuda.mem_get_info(self._device)[0]

    def closed(self) -> None:
        """Note what is left, after the arm is closed."""
        free_memory(self._device)
        if self._is_cuda:
            self.use.not_freed = torch.cuda.memory_allocated(self._device) - self._allocated

    def _peaks(self) -> tuple[int, int]:
        return (
            torch.cuda.max_memory_allocated(self._device) - self._allocated,
            torch.cuda.max_memory_reserved(self._device) - self._reserved,
        )


def free_memory(device: torch.device) -> None:
    """Collect garbage and give cached device memory back to the driver, workspaces of the math libraries too.

    Each arm takes its own workspaces, as in a process of its own. No graph may live whose kernels use them.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(action: Callable[[], object], device: torch.device) -> float:
    """Wall-clock time of an action in seconds, the device's part included."""
    synchronize(device)
    started = time.perf_counter()
    action()
    synchronize(device)
    return time.perf_counter() - started
