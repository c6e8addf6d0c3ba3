"""The owner of all graph state: engine, recordings, addresses and counts."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn

from graphstep.capture.manifest import Entry, Manifest
from graphstep.capture.observe import Observation, observe, watch_run
from graphstep.capture.report import CaptureReport, RegionStats
from graphstep.engine import Engine, Recording, engine_for
from graphstep.errors import LifecycleError

T = TypeVar("T")


class GraphSession:
    """Captures regions with one engine and one memory pool, and frees all of it together.

    No graph state lives anywhere else, and two sessions in one process do not notice each other. A session is
    OPEN until :meth:`close`; a closed one refuses everything but :meth:`close` and :meth:`report`. It is also closed
    when it is collected or when the process ends, before process groups go away.

    Args:
        device: where the captured tensors live.
        engine: the engine to use; by default the one for the device. The session closes it.
    """

    def __init__(self, device: torch.device | str, *, engine: Engine | None = None) -> None:
        self.engine = engine if engine is not None else engine_for(device)
        self.manifest = Manifest()
        self._recordings: list[Recording] = []
        self._stats: dict[str, RegionStats] = {}
        # At exit too: graphs that hold collectives must be gone before their process group.
        self._finalizer = weakref.finalize(self, self.engine.close)

    @property
    def device(self) -> torch.device:
        """Where the captured tensors live."""
        return self.engine.device

    @property
    def is_closed(self) -> bool:
        """True once closed."""
        return not self._finalizer.alive

    def stats(self, name: str, kind: str) -> RegionStats:
        """The counts of one region, made on first use."""
        found = self._stats.get(name)
        if found is None:
            found = self._stats[name] = RegionStats(name, kind)
        return found

    def watch(self, modules: Sequence[tuple[str, nn.Module]]) -> tuple[Entry, ...]:
        """Note the addresses of the modules' parameters and buffers; returns their entries for :func:`verify`."""
        self._require_open()
        return self.manifest.add_modules(modules)

    def watch_run(self, function: Callable[[], T]) -> tuple[T, Observation]:
        """Run ``function`` for real, tell what it touched, and keep alive what it reads."""
        self._require_open()
        result, observation = watch_run(function)
        self.manifest.keep_alive(observation.externals)
        return result, observation

    def observe(self, function: Callable[[], Any], *, num_runs: int = 1) -> Observation:
        """Run ``function`` eagerly, undo what it did, and keep alive what it reads. See :func:`observe`."""
        self._require_open()
        observation = observe(function, self.engine, num_runs=num_runs)
        self.manifest.keep_alive(observation.externals)
        return observation

    def capture(
        self, stats: RegionStats, function: Callable[[], Any], *, generators: Sequence[torch.Generator] = ()
    ) -> Recording:
        """Capture ``function`` and count it for a region. See :meth:`graphstep.engine.Engine.capture`."""
        self._require_open()
        recording = self.engine.capture(function, generators=generators)
        self._recordings.append(recording)
        stats.num_recordings += 1
        stats.num_operations += recording.num_operations or 0
        stats.pool_bytes += recording.nbytes
        return recording

    @contextmanager
    def timed(self, stats: RegionStats) -> Iterator[None]:
        """Add the time that the body takes, device included, to a region's capture time."""
        started = time.perf_counter()
        try:
            yield
        finally:
            if not self.is_closed:
                self.engine.synchronize()
            stats.capture_seconds += time.perf_counter() - started

    def release(self, recordings: Sequence[Recording], stats: RegionStats) -> None:
        """Close some recordings before the session ends, when no other recording continues from their memory."""
        for recording in recordings:
            stats.num_recordings -= 1
            stats.num_operations -= recording.num_operations or 0
            stats.pool_bytes -= recording.nbytes
            recording.close()
        gone = {id(recording) for recording in recordings}
        self._recordings = [recording for recording in self._recordings if id(recording) not in gone]

    def release_all(self) -> None:
        """Close every recording and keep the session usable: after a capture of several recordings failed half-way."""
        for stats in self._stats.values():
            stats.num_recordings = stats.num_operations = stats.pool_bytes = stats.static_bytes = 0
        for recording in self._recordings:
            recording.close()
        self._recordings.clear()

    def report(self) -> CaptureReport:
        """What has been captured so far and how it was used."""
        pool = 0 if self.is_closed else self.engine.pool_bytes
        return CaptureReport(self.engine.name, tuple(self._stats.values()), pool)

    def close(self) -> None:
        """Free the recordings, then the pool, then let go of the tensors they used. May be called twice."""
        self._finalizer()
        self._recordings.clear()
        self.manifest.forget()

    def __enter__(self) -> GraphSession:
        self._require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if self.is_closed:
            raise LifecycleError("the session is closed", fix="make a new GraphSession")
