"""A server that is told to stop finishes what runs, takes nothing new, and waits only so long."""

from __future__ import annotations

import threading
import time
from typing import Any

from tests.server.serving import NAME, RunningServer, running, wait_for

BODY = {"model": NAME, "prompt": "x", "max_tokens": 30, "ignore_eos": True}


def ask_beside(server: RunningServer, body: Any) -> tuple[threading.Thread, list[tuple[int, Any]]]:
    answers: list[tuple[int, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(server.ask("POST", "/v1/completions", body)))
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
