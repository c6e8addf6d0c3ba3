"""Listening, and stopping without losing an answer; by uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from graphstep.errors import ConfigError, Problem
from graphstep.inference.engine import DynamicEngine
from graphstep.server.app import ServerApp
from graphstep.server.model import ServedModel
from graphstep.server.options import ServerOptions

_MOST_HEAD_BYTES = 64 << 10
_BACKLOG = 2048


def bind(options: ServerOptions) -> socket.socket:
    """Take the address, so that a wrong one is known before a model is loaded. Nobody can connect yet.

    Raises:
        ConfigError: it is taken, or not one of this machine.
    """
    try:
        found = socket.getaddrinfo(
            options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE, proto=socket.IPPROTO_TCP
        )
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        what = f"cannot listen on {options.host}, port {options.port}: {error.strerror or error}"
        fix = "choose another --port (0: a free one), or an address of this machine as --host"
        raise ConfigError(Problem("serve-address", what, "--host, --port", fix)) from error
    return listener


class HttpServer(uvicorn.Server):
    """Serves until a signal or `stop`; then it takes no new requests, and waits for those that run.

    Args:
        engine: nobody else may use it while the server runs; not closed here.
        model: what clients see.
        options: address, limits, key.
        on_start: called once clients can connect.
    """

    def __init__(
        self,
        engine: DynamicEngine,
        model: ServedModel,
        options: ServerOptions,
        *,
        on_start: Callable[[], None] | None = None,
    ) -> None:
        self.stopped_by: int | None = None
        """The first signal that asked it to stop."""
        self._on_start = on_start
        self._app = ServerApp(engine, model, options)
        super().__init__(
            uvicorn.Config(
                self._app.build(),
                http=TimedProtocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=_BACKLOG,
                limit_concurrency=options.max_connections + 1,  # uvicorn refuses the connection that reaches it
                timeout_keep_alive=options.idle_seconds,
                timeout_graceful_shutdown=options.shutdown_seconds,
                h11_max_incomplete_event_size=_MOST_HEAD_BYTES,
            )
        )

    def stop(self) -> None:
        """Ask it to stop; from any thread."""
        self.should_exit = True

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve; afterwards the engine is free for others."""
        try:
            super().run(sockets)
        finally:
            self._app.close()  # a second Ctrl-C skips the end of the application

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        if self._on_start is not None:
            self._on_start()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Note a signal; a second Ctrl-C does not wait for running requests."""
        self.stopped_by = self.stopped_by or sig
        super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals while it runs. uvicorn would send them once more afterwards: the engine is not closed then."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {each: signal.signal(each, self.handle_exit) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


class TimedProtocol(H11Protocol):
    """Closes connections whose request head does not arrive, or that send parts of one for ever."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start to wait for a head."""
        # Answers whose client does not read cannot be ended in any other way.
        self.app_state = {**self.app_state, "abort": transport.abort}
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Take bytes; any number of them that are no whole head do not give more time."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._forget_head()
        elif self._head_timer is None:
            self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._forget_head()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(self.timeout_keep_alive, self._give_up)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()


def run_server(
    engine: DynamicEngine,
    model: ServedModel,
    options: ServerOptions,
    listener: socket.socket,
    *,
    on_start: Callable[[], None] | None = None,
) -> int | None:
    """Serve until a signal.

    Returns:
        The signal that ended it.
    """
    server = HttpServer(engine, model, options, on_start=on_start)
    server.run(sockets=[listener])
    return server.stopped_by


def address_of(listener: socket.socket) -> str:
    """Return the address as clients write it."""
    name: Any = listener.getsockname()
    host = f"[{name[0]}]" if listener.family is socket.AF_INET6 else name[0]
    return f"http://{host}:{name[1]}"
