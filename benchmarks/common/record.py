"""What is known of an arm, and the results as plain data."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from common.check import Agreement
from common.clocks import MemoryUse, Spread, StepTimes
from common.device_time import DeviceTime
from common.environment import without_paths

_DIGITS = 6


@dataclass(kw_only=True, slots=True)
class PassRecord:
    """One build of an arm, timed."""

    times: StepTimes
    memory: MemoryUse
    ready_seconds: float
    """From the start of building until the first steady step: copy of the model, warmup, capture or compilation."""
    capture_seconds: float | None
    """Capture or compilation alone."""
    details: dict[str, Any]
    """What the arm tells of how it ran."""


@dataclass(kw_only=True, slots=True)
class ArmRecord:
    """Everything measured of one arm."""

    name: str
    is_ours: bool
    status: str = "ok"
    """``ok``, ``unavailable`` (cannot run here) or ``failed``."""
    reason: str = ""
    """Why it is not ``ok``."""
    passes: list[PassRecord] = field(default_factory=list)
    device_time: DeviceTime | None = None
    normal: Agreement | None = None
    """Compared with eager, kernels as they come."""
    deterministic: Agreement | None = None
    """Compared with eager, deterministic kernels in both."""

    @property
    def step(self) -> Spread | None:
        """Single steps of all passes, ms."""
        return self._spread([times.step for times in self._times()])

    @property
    def launch(self) -> Spread | None:
        """Host time of those steps, ms."""
        return self._spread([times.launch for times in self._times()])

    @property
    def back_to_back(self) -> Spread | None:
        """Rounds of all passes, ms a step."""
        return self._spread([times.back_to_back for times in self._times()])

    def over_device_time(self, spread: Spread | None) -> float | None:
        """Median of a spread over the sum of the arm's own device time."""
        if spread is None or self.device_time is None:
            return None
        return spread.median / self.device_time.sum_ms

    def memory(self, name: str) -> int | None:
        """A field of the memory use, the largest of all passes."""
        values = [value for p in self.passes if (value := getattr(p.memory, name)) is not None]
        return max(values, default=None)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data; the passes apart, so that drift shows."""
        return {
            "name": self.name,
            "is_ours": self.is_ours,
            "status": self.status,
            "reason": self.reason,
            "step_ms": _plain(self.step),
            "back_to_back_ms": _plain(self.back_to_back),
            "launch_ms": _plain(self.launch),
            "step_over_device_time": self.over_device_time(self.step),
            "back_to_back_over_device_time": self.over_device_time(self.back_to_back),
            "device_time": _plain(self.device_time),
            "memory_bytes": {f.name: self.memory(f.name) for f in dataclasses.fields(MemoryUse)},
            "compared_with_eager": {
                "normal": _plain(self.normal),
                "deterministic": _plain(self.deterministic),
            },
            "passes": [
                {
                    "step_ms": _plain(Spread.of(p.times.step)),
                    "back_to_back_ms": _plain(Spread.of(p.times.back_to_back)),
                    "launch_ms": _plain(Spread.of(p.times.launch)),
                    "memory_bytes": _plain(p.memory),
                    "ready_seconds": p.ready_seconds,
                    "capture_seconds": p.capture_seconds,
                    "details": p.details,
                }
                for p in self.passes
            ],
        }

    def _times(self) -> list[StepTimes]:
        return [p.times for p in self.passes]

    @staticmethod
    def _spread(parts: list[list[float]]) -> Spread | None:
        values = [value for part in parts for value in part]
        return Spread.of(values) if values else None


def failure(title: str, error: Exception) -> str:
    """Why an arm is ``failed``, in one line without folders."""
    first_line = (str(error).splitlines() or [""])[0]
    return without_paths(f"{title}: {type(error).__name__}: {first_line}")[:300]


def rounded(value: Any) -> Any:
    """The same plain data with floats of six significant digits; what is not finite becomes a word."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else str(value)
    return value


def one_line(results: dict[str, Any]) -> str:
    """The results as one line of JSON: without names of kernels and calls, and of the passes only what shows drift."""
    return json.dumps(results | {"arms": [_short(arm) for arm in results["arms"]]}, separators=(",", ":"))


def _short(arm: dict[str, Any]) -> dict[str, Any]:
    if not arm["passes"]:
        return {key: arm[key] for key in ("name", "is_ours", "status", "reason")}
    kept = {key: value for key, value in arm.items() if key != "passes"}
    for key in ("step_ms", "back_to_back_ms", "launch_ms"):
        kept[key] = {name: kept[key][name] for name in ("median", "p10", "p90", "count")}
    if kept["device_time"] is not None:
        kept["device_time"] = {k: v for k, v in kept["device_time"].items() if k not in ("top_kernels", "host_calls")}
    kept["passes"] = [
        {
            "step_ms": timed["step_ms"]["median"],
            "capture_seconds": timed["capture_seconds"],
            "ready_seconds": timed["ready_seconds"],
        }
        for timed in arm["passes"]
    ]
    return kept


def write_results(results: dict[str, Any], folder: Path, *, now: datetime) -> Path:
    """Write a file that no earlier result has: ``<benchmark>-<gpu>-<date>-<commit>.json``, whole or not at all."""
    device = results["machine"]["gpu"] or results["machine"]["device"]
    slug = re.sub(r"[^a-z0-9]+", "-", str(device).lower()).strip("-")
    stem = f"{results['benchmark']}-{slug}-{now:%Y%m%d}-{results['commit']['commit'][:8]}"
    folder.mkdir(parents=True, exist_ok=True)
    path, number = folder / f"{stem}.json", 1
    while path.exists():
        number += 1
        path = folder / f"{stem}-{number}.json"
    unfinished = path.with_suffix(".json.part")
    unfinished.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(path)
    return path


def _plain(value: Any) -> dict[str, Any] | None:
    return None if value is None else dataclasses.asdict(value)
