"""Many clients at once: nobody's answer is lost or mixed up, and what is too much is refused."""

from __future__ import annotations

import asyncio
import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.inference.generation import greedy
from tests.server.serving import KEY, NAME, RunningServer, post, running
from tests.waiting import wait_for

from graphstep.inference.text import ByteText


async def ask(server: RunningServer, body: dict[str, Any], *, leaves_after: int | None = None) -> str | None:
    """Return the text that a client gets; ``None``: it left before."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        writer.write(post(body, Connection="close"))
        await writer.drain()
        if leaves_after is not None:
            await reader.read(leaves_after)
            return None
        head, _, content = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    if not head.startswith(b"HTTP/1.1 200"):
        return head.split(b"\r\n")[0].decode()
    if not body.get("stream"):
        return str(json.loads(content)["choices"][0]["text"])
    # The body comes in chunks, each behind its length.
    data = b""
    while content:
        size, _, content = content.partition(b"\r\n")
        data += content[: int(size, 16)]
        content = content[int(size, 16) + 2 :]
    events = [line[6:] for line in data.decode().splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return "".join(json.loads(event)["choices"][0]["text"] for event in events)


@pytest.mark.parametrize(
    ("scope", "device"), [("none", "cpu"), ("block", "cpu"), pytest.param("block", "cuda", marks=pytest.mark.gpu)]
)
def test_two_hundred_at_once_get_their_own_answers(scope: str, device: str) -> None:
    generator = random.Random(scope)
    with running(scope=scope, device=device, max_queue=400, max_connections=400) as server:
        bodies = []
        for number in range(200):
            prompt = "".join(generator.choices("abcdef", k=generator.randint(1, 40)))
            tokens = generator.randint(1, 8)
            bodies.append({"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": number % 2 == 0})

        async def all_at_once() -> list[str | None]:
            leaving = [5 if number % 7 == 3 else None for number in range(len(bodies))]
            return await asyncio.gather(
                *(ask(server, body, leaves_after=after) for body, after in zip(bodies, leaving, strict=True))
            )

        answers = asyncio.run(all_at_once())
        assert wait_for(server.is_idle)
        assert server.metric('http_requests_total{path="/v1/completions",status="200"}') >= 150
        server.stop()  # A client that left late would wake the thread that steps the engine.
        prompts = [list(str(body["prompt"]).encode()) for body in bodies]
        settings = [greedy(int(body["max_tokens"]), stop_tokens=ByteText.stop_tokens) for body in bodies]
        for request, answer in zip(server.engine.generate(prompts, settings), answers, strict=True):
            stream = ByteText().stream()
            wanted = "".join([*(stream.add(token) for token in request.output_tokens), stream.finish()])
            assert answer in (wanted, None)
        assert sum(answer is not None for answer in answers) == 200 - 200 // 7 - 1 + (200 % 7 < 4)


def test_full_queue_refuses_and_recovers() -> None:
    with running(max_queue=4) as server:
        server.slow.seconds = 0.02
        body = {"model": NAME, "prompt": "x", "max_tokens": 30, "ignore_eos": True}
        with ThreadPoolExecutor(40) as pool:
            answers = list(pool.map(lambda _: server.ask("POST", "/v1/completions", body), range(40)))
        statuses = [status for status, _ in answers]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 12
        refused = next(answer for status, answer in answers if status == 429)
        assert refused["error"]["code"] == "queue_full"
        assert all(answer["usage"]["completion_tokens"] == 30 for status, answer in answers if status == 200)
        assert wait_for(server.is_idle)
        assert server.complete()[0] == 200


def test_more_sequences_than_there_can_be_places_for_are_not_told_to_try_again() -> None:
    with running(max_queue=1) as server:  # and 8 in a batch
        assert server.complete(n=9)[0] == 200
        status, answer = server.complete(n=10)
        assert status == 400
        assert answer["error"]["message"] == "10 sequences in one request; at most 9 are allowed"


def test_connections_are_limited() -> None:
    with running(max_connections=5) as server:
        held = [server.connect() for _ in range(5)]
        try:
            assert wait_for(lambda: len(server.server.server_state.connections) == 5)
            assert server.ask("GET", "/health")[0] == 503
        finally:
            for connection in held:
                connection.close()
        assert wait_for(lambda: server.ask("GET", "/health")[0] == 200)


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nX: ", post({"prompt": "x"})[:-3]])
def test_half_sent_requests_do_not_keep_others_out(sent: bytes) -> None:
    """All places are taken by clients that send no more; nobody closes these connections but the server."""
    with running(max_connections=5, idle_seconds=1, body_seconds=1.0) as server:
        held = [server.connect() for _ in range(5)]
        try:
            for connection in held:
                connection.sendall(sent)
            assert wait_for(lambda: len(server.server.server_state.connections) == 5)
            assert server.ask("GET", "/health")[0] == 503
            assert wait_for(lambda: server.ask("GET", "/health")[0] == 200, 5)
        finally:
            for connection in held:
                connection.close()


def test_requests_of_a_failed_step_get_an_error_and_the_next_ones_answers() -> None:
    with running() as server:
        server.slow.failures.append(RuntimeError("the device is on fire"))
        status, answer = server.complete(n=4)
        assert status == 500
        assert "RuntimeError in the engine" in answer["error"]["message"]
        assert "on fire" not in answer["error"]["message"]
        assert server.metric('sequences_total{reason="error"}') == 4
        assert server.complete()[0] == 200
        assert server.ask("GET", "/health")[0] == 200
        server.slow.failures += [RuntimeError("again")] * 3
        for _ in range(3):
            assert server.complete(stream=True)[1].count("generation failed") == 1
        status, answer = server.ask("GET", "/health")
        assert status == 503
        assert "3 steps" in answer["status"]
        assert server.metric("healthy") == 0
        assert server.complete()[0] == 200  # the engine is tried in any case
        assert server.ask("GET", "/health")[0] == 200


def test_key_is_asked_for_everywhere_but_for_health() -> None:
    with running(api_key=KEY) as server:
        assert server.ask("GET", "/health")[0] == 200
        body = {"prompt": "x", "max_tokens": 2}
        for path, method in (("/v1/models", "GET"), ("/metrics", "GET"), ("/x", "GET"), ("/v1/completions", "POST")):
            for header in ({}, {"Authorization": "Bearer"}, {"Authorization": f"Basic {KEY}"}, {"Authorization": KEY}):
                status, answer = server.ask(method, path, body if method == "POST" else None, **header)
                assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert server.ask(method, path, None, Authorization=f"Bearer {KEY}x")[0] == 401
        assert server.ask("GET", "/v1/models", None, Authorization=f"Bearer {KEY}")[0] == 200
        assert server.ask("POST", "/v1/completions", body, Authorization=f"bearer {KEY}")[0] == 200
        status, _ = server.ask("GET", "/v1/models", None, Authorization="Bearer \u00fc\u00e4")
        assert status == 401
        lines = server.ask("GET", "/metrics", None, Authorization=f"Bearer {KEY}")[1].splitlines()
        assert 'graphstep_http_requests_total{path="/v1/completions",status="401"} 5' in lines
