"""The owner of all graph state: engine, recordings, addresses and counts."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Final, Protocol, TypeVar

import torch
from torch import Tensor, nn

from graphstep.capture.garbage import collected_once
from graphstep.capture.gradients import Homes, holders_counted
from graphstep.capture.manifest import Manifest, Watched
from graphstep.capture.observe import Observation, observe, watch_run
from graphstep.capture.places import join
from graphstep.capture.randomness import HostRandomness
from graphstep.capture.report import CaptureReport, PoolUse, RegionStats, lane_name
from graphstep.engine import Engine, Recording, engine_for
from graphstep.errors import CaptureError, LifecycleError

T = TypeVar("T")

_MOST_NAMED: Final = 4


class HasStaticTensors(Protocol):
    """Owns memory that each replay refreshes before its graph reads it."""

    def static_tensors(self) -> list[Tensor]:
        """Inputs at fixed addresses that nobody else writes or holds."""


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
        self.gradient_homes: Homes = {}
        """Where gradients live that recordings write, by parameter."""
        self.ahead: weakref.ref[Any] | None = None
        """The run that has launched something before its call, and waits for that call."""
        self._recordings: dict[Recording, Sequence[Tensor]] = {}
        """Each with the tensors that it uses and that must not go before it."""
        self._stats: dict[str, RegionStats] = {}
        self._static: weakref.WeakSet[HasStaticTensors] = weakref.WeakSet()
        self._is_in_a_row = False
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

    @property
    def has_recordings(self) -> bool:
        """True while there are recordings that may write what they share."""
        return bool(self._recordings)

    def stats(self, name: str, kind: str) -> RegionStats:
        """The counts of one region, made on first use."""
        found = self._stats.get(name)
        if found is None:
            found = self._stats[name] = RegionStats(name, kind)
        return found

    def settle_ahead(self) -> None:
        """Something else happens than the call that was expected: what was launched for it is undone."""
        ahead, self.ahead = self.ahead, None
        run = ahead() if ahead is not None else None
        if run is not None:
            run.undo_ahead()

    def watch(
        self, modules: Sequence[tuple[str, nn.Module]], leaves: Sequence[Tensor] = (), *, may_be_frozen: bool = False
    ) -> Watched:
        """Note the modules' parameters and buffers, and leaves that nobody owns, as they are; for :func:`verify`.

        Raises:
            CaptureError: there is a module of ``torch.jit``, which keeps its parameters where Python cannot look.
        """
        self.require_open()
        _refuse_scripted(modules)
        return self.manifest.watch(modules, leaves, may_be_frozen=may_be_frozen)

    def watch_run(self, function: Callable[[], T]) -> tuple[T, Observation]:
        """Run ``function`` for real, and tell what it touched."""
        self.require_open()
        return watch_run(function)

    def observe(self, function: Callable[[], Any], *, num_runs: int = 1) -> Observation:
        """Run ``function`` eagerly and undo what it did. See :func:`observe`."""
        self.require_open()
        return observe(function, self.engine, num_runs=num_runs)

    def capture(
        self,
        stats: RegionStats,
        function: Callable[[], Any],
        *,
        observation: Observation | None = None,
        lane: Hashable = 0,
    ) -> Recording:
        """Capture ``function`` and count it for a region. See :meth:`graphstep.engine.Engine.capture`.

        Args:
            stats: where to count.
            function: takes nothing.
            observation: of a run of ``function``: names its generators, and what it reads is kept alive with the
                recording.
            lane: recordings of one lane share memory, see the engine.

        Raises:
            CaptureError: it cannot be captured, or it drew random numbers on the host, which a replay would not.
        """
        self.require_open()
        observation = observation or Observation()
        host = HostRandomness(self.device)
        try:
            with holders_counted(self.gradient_homes.values()):
                recording = self.engine.capture(
                    function, generators=observation.generators, lane=lane, collect_first=not self._is_in_a_row
                )
        except BaseException:
            host.restore()
            raise
        drawn = host.restore()
        if drawn:
            recording.close()
            raise CaptureError(
                f"the function drew random numbers on the host, from {' and '.join(drawn)}; replays would repeat what "
                "followed from them",
                where=stats.name,
                fix="draw on the device with torch operations, or before the captured call",
            )
        self._recordings[recording] = observation.externals
        stats.num_recordings += 1
        stats.num_operations += recording.num_operations or 0
        stats.pool_bytes += recording.nbytes
        return recording

    @contextmanager
    def captures_in_a_row(self) -> Iterator[None]:
        """Collect garbage once for all captures of the body."""
        with collected_once():
            self._is_in_a_row = True
            try:
                yield
            finally:
                self._is_in_a_row = False

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
        with holders_counted(self.gradient_homes.values()):
            for recording in recordings:
                stats.num_recordings -= 1
                stats.num_operations -= recording.num_operations or 0
                stats.pool_bytes -= recording.nbytes
                recording.close()
                self._recordings.pop(recording, None)

    def release_all(self) -> None:
        """Close every recording and keep the session usable: after a capture of several recordings failed half-way."""
        for stats in self._stats.values():
            stats.num_recordings = stats.num_operations = stats.pool_bytes = stats.static_bytes = 0
        for recording in self._recordings:
            recording.close()
        self._recordings.clear()

    def note_static(self, owner: HasStaticTensors) -> None:
        """This one owns static inputs of a recording, for as long as it lives."""
        self._static.add(owner)

    def static_tensors(self) -> list[Tensor]:
        """The static inputs of all recordings: overwritten before their next replay."""
        return [tensor for owner in self._static for tensor in owner.static_tensors()]

    def report(self) -> CaptureReport:
        """What has been captured so far and how it was used."""
        rows = tuple(stats.copy() for stats in self._stats.values())
        if self.is_closed:
            return CaptureReport(self.engine.name, rows, 0)
        pools = tuple(PoolUse(lane_name(lane), size) for lane, size in self.engine.lane_bytes.items())
        pool_bytes = sum(pool.nbytes for pool in pools)
        return CaptureReport(
            self.engine.name, rows, pool_bytes, pools=pools, workspace_bytes=self.engine.workspace_bytes
        )

    def close(self) -> None:
        """Free the recordings, then the pool, then let go of the tensors they used. May be called twice."""
        self._finalizer()
        self._recordings.clear()
        self.manifest.forget()
        self.gradient_homes.clear()

    def __enter__(self) -> GraphSession:
        self.require_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def require_open(self) -> None:
        """Refuse to go on with a closed session.

        Raises:
            LifecycleError: it is closed.
        """
        if self.is_closed:
            raise LifecycleError("the session is closed", fix="make a new GraphSession")


def _refuse_scripted(modules: Sequence[tuple[str, nn.Module]]) -> None:
    scripted = [
        join(path, inner) if inner else path or type(module).__name__
        for path, module in modules
        for inner, each in module.named_modules()
        if isinstance(each, torch.jit.ScriptModule)
    ]
    if scripted:
        raise CaptureError(
            "modules of torch.jit cannot be captured: whether their parameters have moved cannot be seen",
            where=", ".join(scripted[:_MOST_NAMED]),
            fix="use the module that torch.jit was given; torch.compile works inside of graphs",
        )
