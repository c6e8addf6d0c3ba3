"""The thread of the engine, without HTTP."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.inference.generation import build_engine, build_model, greedy
from tests.server.serving import Slow

from graphstep.errors import RequestError
from graphstep.inference.engine import DynamicEngine
from graphstep.inference.requests import FinishReason, Output
from graphstep.server.errors import ApiError
from graphstep.server.worker import EngineWorker

Events = asyncio.Queue[tuple[int, Output]]


@asynccontextmanager
async def working(capacity: int = 8) -> AsyncIterator[tuple[EngineWorker, DynamicEngine, Slow]]:
    with build_engine(build_model("llama")) as engine:
        slow = Slow(engine)
        worker = EngineWorker(engine, asyncio.get_running_loop(), capacity=capacity)
        try:
            yield worker, engine, slow
        finally:
            await asyncio.to_thread(worker.close)
        assert engine.blocks.num_available == engine.blocks.capacity
        await asyncio.sleep(0)
        assert worker.num_unsettled == 0


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


async def ends(events: Events, number: int) -> dict[int, Output]:
    found: dict[int, Output] = {}
    while len(found) < number:
        index, output = await events.get()
        if output.finish_reason is not None:
            assert index not in found
            found[index] = output
    return found


def test_tokens_are_those_of_the_engine() -> None:
    async def test() -> None:
        async with working() as (worker, engine, _):
            events: Events = asyncio.Queue()
            await worker.submit([([1, 2, 3], greedy(6)), ([4], greedy(3))], events)
            found = await ends(events, 2)
            tokens = [found[index].request.output_tokens for index in (0, 1)]
            wanted = await worker.call(lambda: engine.generate([[1, 2, 3], [4]], [greedy(6), greedy(3)]))
            assert tokens == [request.output_tokens for request in wanted]

    run(test)


def test_sequences_are_taken_all_or_none() -> None:
    async def test() -> None:
        async with working(capacity=3) as (worker, engine, _):
            events: Events = asyncio.Queue()
            with pytest.raises(RequestError, match="tokens must lie between"):
                await worker.submit([([1], greedy(4)), ([4000], greedy(4))], events)
            assert not engine.has_work
            assert worker.num_unsettled == 0
            with pytest.raises(ApiError, match="0 of 3 places") as caught:
                await worker.submit([([1], greedy(4))] * 4, events)
            assert caught.value.status == 429
            assert events.empty()

    run(test)


def test_cancelled_before_and_after_the_engine_has_it() -> None:
    async def test() -> None:
        async with working() as (worker, engine, slow):
            slow.seconds = 0.1
            events: Events = asyncio.Queue()
            jobs = await worker.submit([([1], greedy(20))] * 3, events)
            await asyncio.sleep(0.03)  # a step runs now
            late = asyncio.create_task(worker.submit([([2], greedy(20))], events))
            await asyncio.sleep(0.01)
            late.cancel()
            with pytest.raises(asyncio.CancelledError):
                await late
            refused = asyncio.create_task(worker.submit([([4000], greedy(20))], events))
            await asyncio.sleep(0.01)
            refused.cancel()
            worker.cancel(jobs[:2])
            worker.cancel(jobs[:2])  # does nothing
            found: dict[int, Output] = {}
            while worker.num_unsettled > 1:
                await asyncio.sleep(0.01)
            assert await worker.call(lambda: engine.num_running) == 1
            worker.cancel(jobs, FinishReason.STOP)
            while worker.num_unsettled:
                await asyncio.sleep(0.01)
            while not events.empty():
                index, output = events.get_nowait()
                if output.finish_reason is not None and output.request is jobs[index].request:
                    found[index] = output
            assert {index: output.finish_reason for index, output in found.items()} == {
                0: FinishReason.CANCELLED,
                1: FinishReason.CANCELLED,
                2: FinishReason.STOP,
            }

    run(test)


def test_close_ends_what_runs_and_refuses_what_comes() -> None:
    async def test() -> None:
        async with working() as (worker, _, slow):
            slow.seconds = 0.05
            events: Events = asyncio.Queue()
            await worker.submit([([1], greedy(20))] * 2, events)
            waiting = [asyncio.create_task(worker.submit([([1], greedy(20))], events)) for _ in range(3)]
            closing = [asyncio.create_task(asyncio.to_thread(worker.close)) for _ in range(2)]
            found = await ends(events, 2)
            assert {output.finish_reason for output in found.values()} == {FinishReason.CANCELLED}
            await asyncio.gather(*closing)
            results = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(result, list) or result.status == 503 for result in results)
            assert worker.problem == "the engine has stopped"
            with pytest.raises(ApiError, match="stopped"):
                await worker.submit([([1], greedy(20))], events)

    run(test)


def test_error_of_a_call_belongs_to_the_caller() -> None:
    async def test() -> None:
        async with working() as (worker, _, _slow):
            with pytest.raises(ZeroDivisionError):
                await worker.call(lambda: 1 // 0)
            assert await worker.call(lambda: threading.current_thread().name) == "graphstep-engine"
            assert worker.problem is None

    run(test)


def test_thread_sleeps_without_work() -> None:
    async def test() -> None:
        async with working() as (worker, engine, _):
            events: Events = asyncio.Queue()
            await worker.submit([([1], greedy(2))], events)
            await ends(events, 1)
            await asyncio.sleep(0.05)
            steps, start = engine.counts.steps, time.thread_time()
            await asyncio.sleep(0.1)
            assert engine.counts.steps == steps
            assert time.thread_time() - start < 0.1

    run(test)


def test_loop_that_has_ended_does_not_hang_the_thread() -> None:
    with build_engine(build_model("llama")) as engine:

        async def leave() -> EngineWorker:
            worker = EngineWorker(engine, asyncio.get_running_loop(), capacity=4)
            await worker.submit([([1], greedy(20))], asyncio.Queue())
            return worker

        worker = asyncio.run(leave())
        worker.close()
        assert worker.problem is not None
        assert engine.blocks.num_available == engine.blocks.capacity
