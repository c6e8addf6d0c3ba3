"""Times of steps, and a profile of a few of them."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from graphstep.coverage.timeline import Timeline, read_timeline
from graphstep.errors import LifecycleError, Problem, UserInputError


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMeasurement:
    """What a step takes."""

    step_ms: float | None
    """Median of steps that were not profiled; None if there were none."""
    host_ms: float | None = None
    """Of the same steps, until the host had issued all work; None where that was not measured."""
    step_spread_ms: float = 0.0
    """Difference of the upper and the lower quartile of these steps."""
    timeline: Timeline | None = None
    """Further steps, profiled."""

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "step_ms": self.step_ms,
            "host_ms": self.host_ms,
            "step_spread_ms": self.step_spread_ms,
            "timeline": self.timeline.to_json() if self.timeline is not None else None,
        }


def start_profiler(device: torch.device | str) -> None:
    """Profile next to nothing, so that the profiler is set up before graphs that it will see are captured."""
    device = torch.device(device)
    if device.type == "cuda":
        with profile(activities=_activities(device), acc_events=True):
            torch.zeros(8, device=device).add_(1)
            torch.cuda.synchronize(device)


class StepProfiler:
    """Profiles the steps between :meth:`start` and :meth:`stop`.

    NEW -> RUNNING -> DONE. Leaving its ``with`` block while it runs ends it and drops the profile.

    Args:
        device: where steps run.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._profile: profile | None = None

    @property
    def is_running(self) -> bool:
        """True between start and stop."""
        return self._profile is not None

    def start(self) -> None:
        """Begin; waits for the device, so that work issued before is not seen.

        Raises:
            LifecycleError: it runs already.
        """
        if self._profile is not None:
            raise LifecycleError("the profiler runs already", where="StepProfiler.start", fix="call stop() first")
        _synchronize(self._device)
        self._profile = profile(activities=_activities(self._device), acc_events=True)
        self._profile.__enter__()

    def stop(self, *, num_steps: int) -> Timeline:
        """End, and read what was seen; waits for the device.

        Args:
            num_steps: steps that were run since :meth:`start`.

        Raises:
            LifecycleError: it does not run.
        """
        return read_timeline(self.stop_and_read(), num_steps=num_steps)

    def stop_and_read(self) -> Sequence[Mapping[str, Any]]:
        """End, and return the events of the trace in Chrome's format; waits for the device.

        Raises:
            LifecycleError: it does not run.
        """
        running = self._end()
        if running is None:
            raise LifecycleError("the profiler does not run", where="StepProfiler.stop", fix="call start() first")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            running.export_chrome_trace(str(path))
            # Names of kernels may hold anything, control characters included.
            text = path.read_text(encoding="utf-8", errors="replace")
        events: Sequence[Mapping[str, Any]] = json.loads(text, strict=False)["traceEvents"]
        return events

    def close(self) -> None:
        """End without reading. May be called twice."""
        self._end()

    def __enter__(self) -> StepProfiler:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def _end(self) -> profile | None:
        running, self._profile = self._profile, None
        if running is not None:
            _synchronize(self._device)
            running.__exit__(None, None, None)
        return running


def measure_steps(
    step: Callable[[], object],
    device: torch.device | str,
    *,
    num_warmup: int = 3,
    num_timed: int = 10,
    num_profiled: int = 2,
) -> StepMeasurement:
    """Run a step some times: to warm up, timed one by one, then profiled.

    Args:
        step: a whole step; may update weights. Runs ``num_warmup + num_timed + num_profiled`` times.
        device: where it runs.
        num_warmup: steps before the timed ones.
        num_timed: steps that are timed, each with an idle device before it; at least 1.
        num_profiled: steps that are profiled; 0: none.

    Raises:
        UserInputError: there is nothing to time, or no such device; no step was run.
    """
    device = _checked(device, num_timed)
    for _ in range(num_warmup):
        step()
    step_ms, host_ms = [], []
    for _ in range(num_timed):
        _synchronize(device)
        started = time.perf_counter()
        step()
        issued = time.perf_counter()
        _synchronize(device)
        host_ms.append((issued - started) * 1e3)
        step_ms.append((time.perf_counter() - started) * 1e3)
    timeline = None
    if num_profiled > 0:
        with StepProfiler(device) as profiler:
            profiler.start()
            for _ in range(num_profiled):
                step()
            timeline = profiler.stop(num_steps=num_profiled)
    return StepMeasurement(
        step_ms=statistics.median(step_ms),
        host_ms=statistics.median(host_ms),
        step_spread_ms=spread_of(step_ms),
        timeline=timeline,
    )


def spread_of(times_ms: Sequence[float]) -> float:
    """The difference of the upper and the lower quartile; 0 of fewer than two times."""
    if len(times_ms) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times_ms, n=4, method="inclusive")
    return high - low


def _checked(device: torch.device | str, num_timed: int) -> torch.device:
    device = torch.device(device)
    problems = []
    if num_timed < 1:
        problems.append(
            Problem(
                "measure-num-timed",
                f"the time of a step is the median of at least 1 step, got {num_timed}",
                "measure_steps, argument num_timed",
                "use 10, or StepProfiler to profile alone",
            )
        )
    if device.type == "cuda" and not torch.cuda.is_available():
        problems.append(
            Problem(
                "device-missing",
                "PyTorch sees no CUDA device",
                "measure_steps, argument device",
                'give "cpu", or install a CUDA build of PyTorch',
            )
        )
    if problems:
        raise UserInputError(problems)
    return device


def _activities(device: torch.device) -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
