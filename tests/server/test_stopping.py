"""A server that is told to stop finishes what runs, takes nothing new, and waits only so long."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from typing import Any

from tests.server.serving import NAME, RunningServer, running
from tests.waiting import wait_for

BODY = {"model": NAME, "prompt": "x", "max_tokens": 30, "ignore_eos": True}


def ask_beside(server: RunningServer, body: Any) -> tuple[threading.Thread, list[tuple[int, Any]]]:
    answers: list[tuple[int, Any]] = []

    def ask() -> None:
        with contextlib.suppress(ConnectionError, http.client.HTTPException):
            answers.append(server.ask("POST", "/v1/completions", body))

    thread = threading.Thread(target=ask)
    thread.start()
    assert wait_for(lambda: server.engine.has_work)
    return thread, answers


def test_running_requests_are_finished() -> None:
    with running() as server:
        server.slow.seconds = 0.03
        thread, answers = ask_beside(server, BODY)
        server.server.stop()
        thread.join(10)
        assert answers[0][0] == 200
        assert answers[0][1]["usage"]["completion_tokens"] == 30
        server.thread.join(10)
        try:
            server.connect().close()
        except ConnectionRefusedError:
            return
        raise AssertionError("somebody still listens")


def test_waiting_requests_are_finished_too() -> None:
    """Everything that was accepted is answered: what runs, what waits for a place, and streams."""
    with running(shutdown_seconds=15) as server:
        server.slow.seconds = 0.01
        asked = [ask_beside(server, BODY | {"stream": number % 2 == 0, "n": 2}) for number in range(12)]
        assert wait_for(lambda: server.metric("sequences_waiting") > 0)
        assert wait_for(lambda: server.num_open == 12)
        server.server.stop()
        for thread, _ in asked:
            thread.join(15)
        answers = [answers[0] for _, answers in asked if answers]
        assert [status for status, _ in answers] == [200] * 12
        for number, (_, answer) in enumerate(answers):
            if number % 2 == 0:
                assert answer.rstrip().endswith("data: [DONE]")
                assert answer.count('"finish_reason":"length"') == 2
            else:
                assert answer["usage"]["completion_tokens"] == 60


def test_requests_that_take_too_long_are_told() -> None:
    with running(shutdown_seconds=1) as server:
        server.slow.seconds = 0.1
        thread, answers = ask_beside(server, BODY)
        stream, events = ask_beside(server, BODY | {"stream": True})
        time.sleep(0.2)
        server.server.stop()
        thread.join(10)
        stream.join(10)
        assert answers[0][0] == 503
        assert "stopping" in answers[0][1]["error"]["message"]
        assert events[0][0] == 200
        assert "the server is stopping" in events[0][1]


def test_second_signal_does_not_wait_and_leaves_nothing_behind() -> None:
    with running(shutdown_seconds=20) as server:
        server.slow.seconds = 0.1
        thread, _ = ask_beside(server, BODY | {"max_tokens": 90})
        start = time.monotonic()
        server.server.stop()
        server.server.force_exit = True
        server.thread.join(10)
        assert time.monotonic() - start < 3
        assert not server.engine.has_work
        assert not any(each.name == "graphstep-engine" for each in threading.enumerate())
        thread.join(10)
