"""Clients that are slow, huge, malformed or gone: each gets an answer or is cut off, and costs nothing afterwards."""

from __future__ import annotations

import gzip
import json
import socket
import struct
import time
from typing import Any

import pytest
from tests.server.serving import KEY, NAME, RunningServer, post, running
from tests.waiting import wait_for

LONG = {"model": NAME, "prompt": "x", "max_tokens": 90, "ignore_eos": True}


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while part := connection.recv(1 << 16):
        data += part
    return data


def answer_to(server: RunningServer, data: bytes) -> bytes:
    """What comes back until the server closes the connection, or one answer has come."""
    with server.connect() as connection:
        connection.sendall(data)
        return connection.recv(1 << 16)


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\xff\x01 nonsense\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nHost: y\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /" + b"x" * 2_000_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
    ids=["bytes", "no target", "length", "two lengths", "chunk", "long head"],
)
def test_what_is_no_http_is_refused(server: RunningServer, data: bytes) -> None:
    try:
        answer = answer_to(server, data)
    except ConnectionResetError:
        answer = b""
    assert answer == b"" or answer.split()[1] in (b"400", b"415")


def test_body_of_two_lengths_is_one_to_nobody(server: RunningServer) -> None:
    """A proxy that goes by the length would take what follows for the body; here it would be a request of its own."""
    chunked = {"Transfer-Encoding": "chunked"}
    with server.connect() as connection:
        connection.sendall(post(b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n", **chunked))
        answer = read_all(connection)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"not both" in answer


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://evil.example", 403),
        ("http://localhost.evil.example:8000", 403),
        ("null", 403),
        ("http://192.168.0.7", 403),
        ("http://[::1", 403),
        ("", 403),
        ("http://localhost:3000", 200),
        ("http://127.0.0.1:8000", 200),
        ("http://[::1]:8000", 200),
    ],
)
def test_pages_from_elsewhere_are_refused_without_a_key(server: RunningServer, origin: str, status: int) -> None:
    """A page can make its own name mean this machine, and is then of the same origin to its browser."""
    assert server.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, Origin=origin)[0] == status
    assert server.ask("GET", "/v1/models", Origin=origin)[0] == status


def test_key_lets_in_pages_from_elsewhere() -> None:
    with running(api_key=KEY) as server:
        headers = {"Origin": "https://ui.example", "Authorization": f"Bearer {KEY}"}
        assert server.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, **headers)[0] == 200


def test_packed_bodies_are_refused(server: RunningServer) -> None:
    body = gzip.compress(b'{"prompt": "x"}')
    status, answer = server.ask("POST", "/v1/completions", body, Content_Encoding="gzip")
    assert (status, answer["error"]["code"]) == (415, "unsupported_encoding")
    assert server.ask("POST", "/v1/completions", b'{"prompt": "x"}', Content_Encoding="identity")[0] == 200


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1]", "JSON object"),
        (b"\xff\xfe{}", "not JSON"),
        (b'{"prompt": "x", "temperature": NaN}', "not JSON"),
        (b"[" * 15_000, "not JSON"),
        (b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"prompt": "x", "model": "\\ud800"}', "surrogate"),
        (b'{"prompt": "x", "\\ud800": 1}', "there is no field"),
        (b'{"prompt": []}', "prompt must be"),
        (b'{"prompt": [[]]}', "prompt must be"),
        (b'{"prompt": [1, "a"]}', "prompt must be"),
        (b'{"prompt": [true]}', "prompt must be"),
        (b'{"prompt": [99999]}', "tokens must lie between"),
        (b'{"prompt": ""}', "no tokens"),
        (b'{"prompt": "x", "n": 0}', "n must be"),
        (b'{"prompt": "x", "max_tokens": 1.5}', "max_tokens must be"),
        (b'{"prompt": "x", "stop": [""]}', "a stop text has"),
        (b'{"prompt": "x", "logit_bias": {"1": 2}}', "logit_bias is not supported"),
        (b'{"prompt": "x", "stream_options": {"include_usage": true}}', "needs stream"),
    ],
)
def test_malformed_bodies_are_refused_with_a_reason(server: RunningServer, body: bytes, says: str) -> None:
    status, answer = server.ask("POST", "/v1/completions", body)
    assert status == 400
    assert says in answer["error"]["message"]


def test_only_json_is_taken(server: RunningServer) -> None:
    """A page in a browser can send other types to this machine without being asked first."""
    status, answer = server.ask("POST", "/v1/completions", b'{"prompt": "x"}', Content_Type="text/plain")
    assert status == 415
    assert "application/json" in answer["error"]["message"]


def test_unknown_paths_and_methods(server: RunningServer) -> None:
    assert server.ask("GET", "/v1/nothing")[0] == 404
    assert server.ask("GET", "/v1/completions")[0] == 405
    assert server.ask("DELETE", "/health")[0] == 405


def test_huge_body_is_refused_by_its_length(server: RunningServer) -> None:
    status, answer = server.complete("x" * 30_000)
    assert status == 413
    assert "20000 bytes" in answer["error"]["message"]
    start = time.monotonic()
    with server.connect() as connection:
        connection.sendall(post(b"{", **{"Content-Length": str(10**15)}))
        assert b" 413 " in read_all(connection)  # and it is closed
    assert time.monotonic() - start < 5


def test_huge_body_without_a_length_is_refused(server: RunningServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with server.connect() as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n")
        sent = 0
        try:
            while sent < 10_000_000:
                connection.sendall(b"4000\r\n" + b"x" * 0x4000 + b"\r\n")
                sent += 0x4000
            answer = b""
        except (BrokenPipeError, ConnectionResetError):
            answer = b"cut off"
        assert sent < 10_000_000 or b" 413 " in read_all(connection), answer


def test_slow_body_is_refused(server: RunningServer) -> None:
    with server.connect() as connection:
        connection.sendall(post(LONG)[:-5])
        assert b" 408 " in read_all(connection)


def test_slow_head_is_cut_off_however_many_bytes_come(server: RunningServer) -> None:
    start = time.monotonic()
    with server.connect() as connection:
        for byte in b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100:
            try:
                connection.sendall(bytes([byte]))
            except (BrokenPipeError, ConnectionResetError):
                break
            time.sleep(0.05)
        else:
            pytest.fail("the connection is still open")
    assert time.monotonic() - start < 4


def test_silent_connections_are_closed(server: RunningServer) -> None:
    with server.connect() as never_asked, server.connect() as asked:
        asked.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_all(never_asked) == b""
        assert read_all(asked).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("streams", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("resets", [True, False], ids=["reset", "closed"])
def test_request_of_a_client_that_leaves_is_cancelled(server: RunningServer, streams: bool, resets: bool) -> None:
    before = server.metric('sequences_total{reason="cancelled"}')
    server.slow.seconds = 0.05  # 90 tokens take 4.5 seconds
    with server.connect() as connection:
        connection.sendall(post(LONG | {"stream": streams, "n": 3}))
        assert wait_for(lambda: server.metric("sequences_running") == 3)
        if resets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    start = time.monotonic()
    assert wait_for(server.is_idle)
    assert time.monotonic() - start < 2
    assert server.metric('sequences_total{reason="cancelled"}') == before + 3
    assert server.metric('http_requests_total{path="/v1/completions",status="499"}') > 0


def test_waiting_request_of_a_client_that_leaves_is_cancelled(server: RunningServer) -> None:
    server.slow.seconds = 0.05
    with server.connect() as first, server.connect() as second:
        first.sendall(post(LONG | {"n": 8}))
        assert wait_for(lambda: server.metric("sequences_running") == 8)
        second.sendall(post(LONG | {"n": 5}))
        assert wait_for(lambda: server.metric("sequences_waiting") == 5)
        second.close()
        assert wait_for(lambda: server.metric("sequences_waiting") == 0, 2)
        assert server.metric("sequences_running") == 8


def test_client_that_leaves_before_it_is_accepted(server: RunningServer) -> None:
    server.slow.seconds = 0.4
    with server.connect() as first:
        first.sendall(post(LONG))
        assert wait_for(lambda: server.engine.has_work)
        for _ in range(5):
            with server.connect() as second:
                second.sendall(post(LONG))
                time.sleep(0.02)
    server.slow.seconds = 0


def test_pipelined_requests_are_answered_in_order(server: RunningServer) -> None:
    last = post({"prompt": "b", "max_tokens": 3}, Connection="close")
    with server.connect() as connection:
        connection.sendall(post({"prompt": "a", "max_tokens": 2}) + post(b"{") + last)
        data = read_all(connection)
    assert [part[:3] for part in data.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400", b"200"]
    assert data.index(b'"completion_tokens":2') < data.index(b'"completion_tokens":3')


def test_body_in_single_bytes_is_read(server: RunningServer) -> None:
    with server.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in post({"prompt": "a", "max_tokens": 2}, Connection="close"):
            connection.sendall(bytes([byte]))
        assert read_all(connection).startswith(b"HTTP/1.1 200")


def test_requests_that_take_too_long_are_cancelled() -> None:
    with running(request_seconds=0.4) as server:
        server.slow.seconds = 0.05
        status, answer = server.ask("POST", "/v1/completions", LONG)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        status, text = server.ask("POST", "/v1/completions", LONG | {"stream": True})
        assert status == 200
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        assert events[-1]["error"]["code"] == "timeout"
        assert "[DONE]" not in text
        assert len(events) > 1
        assert wait_for(server.is_idle)


def test_client_that_does_not_read_is_cut_off() -> None:
    """Its answer fills the buffers of both sides, and then nothing moves."""
    with running(request_seconds=1.5, max_choices=2000, max_queue=2000) as server, server.connect() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body: dict[str, Any] = LONG | {"stream": True, "n": 64, "logprobs": 5, "max_tokens": 95}
        connection.sendall(post(body))
        assert wait_for(lambda: server.num_open == 1)
        assert wait_for(server.is_idle)
        assert wait_for(lambda: len(server.server.server_state.connections) <= 1)
