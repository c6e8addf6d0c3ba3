"""A server on a port of its own with a tiny random model, and the ways that tests talk to it."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.inference.generation import build_engine, build_model

from graphstep.inference.engine import DynamicEngine
from graphstep.inference.text import ByteText
from graphstep.server.http_server import HttpServer, bind
from graphstep.server.model import ServedModel
from graphstep.server.options import ServerOptions

NAME = "tiny"
LONGEST = 96
KEY = "a key of tests, and of nothing else"


class Slow:
    """Makes each step of an engine wait, so that requests are still there when something happens to them."""

    def __init__(self, engine: DynamicEngine, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self.failures: list[Exception] = []
        step = engine.step

        def slow_step() -> Any:
            time.sleep(self.seconds)
            if self.failures:
                raise self.failures.pop()
            return step()

        engine.step = slow_step  # type: ignore[method-assign]


class RunningServer:
    """A server in a thread, and its engine."""

    def __init__(self, server: HttpServer, engine: DynamicEngine, listener: socket.socket, slow: Slow) -> None:
        self.server = server
        self.engine = engine
        self.port = listener.getsockname()[1]
        self.slow = slow
        self.thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Return status and body, read as JSON where it is JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            data = None
            if body is not None:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                headers = {"Content-Type": "application/json"} | {k.replace("_", "-"): v for k, v in headers.items()}
            connection.request(method, path, data, headers)
            answer = connection.getresponse()
            content = answer.read()
            is_json = answer.headers.get("content-type", "").startswith("application/json")
            return answer.status, json.loads(content) if is_json else content.decode()
        finally:
            connection.close()

    def complete(self, prompt: Any = "hello", **more: Any) -> tuple[int, Any]:
        return self.ask("POST", "/v1/completions", {"model": NAME, "prompt": prompt, "max_tokens": 8, **more})

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)

    def stop(self) -> None:
        """Stop it; from then on the engine is the caller's. May be called twice."""
        self.server.stop()
        self.thread.join(20)

    def is_idle(self) -> bool:
        """Does nobody hold a block, and does nobody wait?"""
        blocks = self.engine.blocks
        return not self.engine.has_work and blocks.num_available == blocks.capacity and self.num_open == 0

    @property
    def num_open(self) -> int:
        return int(self.metric("http_requests_open"))

    def metric(self, name: str) -> float:
        text = self.ask("GET", "/metrics")[1]
        return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(f"graphstep_{name}"))


def post(body: Any, path: str = "/v1/completions", **headers: str) -> bytes:
    """Return the bytes of a request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(data))} | headers
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
    return "\r\n".join(lines).encode() + data


@contextmanager
def running(
    model: ServedModel | None = None, scope: str = "none", device: str = "cpu", **options: Any
) -> Iterator[RunningServer]:
    """Run a server; when it has stopped, nothing of any request may be left."""
    chosen = ServerOptions(port=0, **{"shutdown_seconds": 5, **options})
    engine = build_engine(
        build_model("llama", device, vocab_size=257, seq_length=LONGEST, max_position_embeddings=LONGEST),
        scope,
        max_requests=8,
        max_tokens=LONGEST,
        num_blocks=129,
    )
    slow = Slow(engine)
    model = model or ServedModel(name=NAME, text=ByteText(), end_tokens=ByteText.stop_tokens)
    with engine:
        listener = bind(chosen)
        started = threading.Event()
        server = RunningServer(HttpServer(engine, model, chosen, on_start=started.set), engine, listener, slow)
        server.thread.start()
        assert started.wait(20)
        try:
            yield server
        finally:
            server.stop()
        assert not server.thread.is_alive()
        assert not engine.has_work
        assert engine.blocks.num_available == engine.blocks.capacity
