"""The thread of the engine: requests go in from an event loop, tokens come back to it.

The engine is not safe for several threads, so that one thread alone touches it. That thread takes what was asked of it,
computes a step, hands all tokens of the step to the event loop in one call, and so on; without work it sleeps.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from graphstep.errors import GraphstepError
from graphstep.inference.engine import DynamicEngine
from graphstep.inference.requests import FinishReason, Output, Request, SamplingParams
from graphstep.server.errors import ApiError

_MOST_FAILURES = 3
"""Steps that fail in a row before the worker says that it is not healthy."""

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class Job:
    """One sequence that a client waits for. `events` gets what the engine gives it, the last with a finish reason."""

    index: int
    """Its place among the sequences of the client's request."""
    prompt: Sequence[int]
    sampling: SamplingParams
    events: asyncio.Queue[tuple[int, Output]]
    """Shared by the sequences of a request; places and outputs."""
    request: Request | None = None
    """Set once the engine has it."""
    is_settled: bool = False
    """Has it had its last event? Belongs to the event loop."""
    failure: str | None = None
    """Why it ended with ``ERROR``, if the engine failed."""


class EngineWorker:
    """Runs an engine in a thread of its own. All methods but `close` are for the event loop that it was made for.

    Args:
        engine: nobody else may use it from now on; not closed by the worker.
        loop: where outputs are delivered.
        capacity: sequences that may be unfinished at once.
    """

    def __init__(self, engine: DynamicEngine, loop: asyncio.AbstractEventLoop, *, capacity: int) -> None:
        self._engine = engine
        self._loop = loop
        self.capacity = capacity
        """Sequences that may be unfinished at once."""
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_stopped = False
        self._is_stopping = False
        self._jobs: dict[int, Job] = {}
        self._num_unsettled = 0
        self._num_failures = 0
        self._thread = threading.Thread(target=self._run, name="graphstep-engine", daemon=True)
        self._thread.start()

    @property
    def num_unsettled(self) -> int:
        """Sequences that have not had their last event."""
        return self._num_unsettled

    @property
    def problem(self) -> str | None:
        """Why it cannot serve; ``None``: it can."""
        if self._is_stopped:
            return "the engine has stopped"
        if self._num_failures >= _MOST_FAILURES:
            return f"the last {self._num_failures} steps of the engine failed"
        return None

    async def submit(
        self, prompts: Sequence[tuple[Sequence[int], SamplingParams]], events: asyncio.Queue[tuple[int, Output]]
    ) -> list[Job]:
        """Hand sequences to the engine, all or none.

        Returns:
            A job a sequence, in order. Whoever gets them cancels those it does not wait for any more.

        Raises:
            ApiError: too many are waiting, or the engine has stopped.
            RequestError: one could never be served.
        """
        if self._num_unsettled + len(prompts) > self.capacity:
            what = f"{self._num_unsettled} of {self.capacity} places are taken: try again later"
            raise ApiError(429, what, code="queue_full")
        jobs = [Job(index, prompt, sampling, events) for index, (prompt, sampling) in enumerate(prompts)]
        self._num_unsettled += len(jobs)
        try:
            await self.call(lambda: self._add(jobs))
        except asyncio.CancelledError:
            self.cancel(jobs)
            raise
        except BaseException:
            for job in jobs:
                self._settle(job)
            raise
        return jobs

    def cancel(self, jobs: Iterable[Job], reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End sequences early, if they are not finished; their blocks are free before the next step."""
        unsettled = [job for job in jobs if not job.is_settled]
        if unsettled and not self._put(lambda: self._end(unsettled, reason)):
            for job in unsettled:
                self._settle(job)

    async def call(self, function: Callable[[], _T]) -> _T:
        """Run a function between two steps of the engine and return what it returns. It may use the engine.

        Raises:
            ApiError: the engine has stopped. Errors of the function pass through.
        """
        future: asyncio.Future[_T] = self._loop.create_future()

        def run() -> None:
            if self._is_stopping:
                self._to_loop(_fail, future, ApiError(503, "the server is stopping"))
                return
            try:
                result = function()
            except Exception as error:  # belongs to whoever asked, not to this thread
                self._to_loop(_fail, future, error)
            else:
                self._to_loop(_resolve, future, result)

        if not self._put(run):
            raise ApiError(503, "the engine has stopped")
        return await future

    def close(self) -> None:
        """End what is unfinished as cancelled, and the thread; waits for the step it is in. May be called twice."""
        self._put(self._stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # What follows runs in the thread of the engine, but for `_put`, `_deliver`, `_settle`.

    def _run(self) -> None:
        try:
            device = self._engine.model.embedding.weight.device
            if device.type == "cuda":
                torch.cuda.set_device(device)  # each thread has its own
            while not self._is_stopping:
                self._obey()
                if self._engine.has_work and not self._is_stopping:
                    self._step()
        except Exception:
            _log.exception("the thread of the engine ended")
        finally:
            with self._lock:
                self._is_stopped = True
            self._is_stopping = True
            while not self._inbox.empty():
                self._inbox.get()()  # tells those who wait that there is no engine any more
            self._report(
                [
                    (job, Output(job.request, None, finish_reason=FinishReason.CANCELLED))
                    for job in self._jobs.values()
                    if job.request is not None
                ]
            )
            self._jobs.clear()

    def _obey(self) -> None:
        may_wait = not self._engine.has_work
        try:
            while not self._is_stopping:
                self._inbox.get(block=may_wait)()
                may_wait = False
        except queue.Empty:
            return

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            _log.exception("a step of the engine failed; its requests end with an error")
            self._num_failures += 1
            what = error.what if isinstance(error, GraphstepError) else f"{type(error).__name__} in the engine"
            jobs = list(self._jobs.values())
            for job in jobs:
                job.failure = what
            self._end(jobs, FinishReason.ERROR)
            return
        self._num_failures = 0
        if not outputs:
            return
        events = []
        for output in outputs:
            number = output.request.number
            if number not in self._jobs:
                continue
            job = self._jobs[number]
            if output.finish_reason is not None:
                del self._jobs[number]
            events.append((job, output))
        self._report(events)

    def _add(self, jobs: Sequence[Job]) -> None:
        added: list[Request] = []
        try:
            for job in jobs:
                added.append(self._engine.add_request(job.prompt, job.sampling))  # noqa: PERF401 - kept if one fails
        except BaseException:
            for request in added:
                self._engine.cancel(request)
            raise
        for job, request in zip(jobs, added, strict=True):
            job.request = request
            self._jobs[request.number] = job

    def _end(self, jobs: Sequence[Job], reason: FinishReason) -> None:
        events = []
        for job in jobs:
            request = job.request
            if request is None:  # the engine refused it
                self._to_loop(self._settle, job)
            elif self._jobs.pop(request.number, None) is not None:
                self._engine.cancel(request, reason)
                events.append((job, Output(request, None, finish_reason=reason)))
        self._report(events)

    def _stop(self) -> None:
        self._is_stopping = True
        for job in self._jobs.values():
            if job.request is not None:
                self._engine.cancel(job.request)

    def _report(self, events: list[tuple[Job, Output]]) -> None:
        if events:
            self._to_loop(self._deliver, events)

    def _to_loop(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            _log.debug("the event loop has ended; nobody waits for this any more")

    def _put(self, command: Callable[[], None]) -> bool:
        with self._lock:  # nothing is put after the thread has looked for the last time
            if self._is_stopped:
                return False
            self._inbox.put(command)
            return True

    def _deliver(self, events: list[tuple[Job, Output]]) -> None:
        for job, output in events:
            if output.finish_reason is not None:
                self._settle(job)
            job.events.put_nowait((job.index, output))

    def _settle(self, job: Job) -> None:
        if not job.is_settled:
            job.is_settled = True
            self._num_unsettled -= 1


def _fail(future: asyncio.Future[_T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _resolve(future: asyncio.Future[_T], result: _T) -> None:
    if not future.done():
        future.set_result(result)
