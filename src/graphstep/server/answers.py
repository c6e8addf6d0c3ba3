"""One answer to one HTTP request, and reading what the client sends; on the level of ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from graphstep.server.errors import ApiError
from graphstep.server.options import ServerOptions
from graphstep.server.replies import to_bytes

_DRAIN_SECONDS = 2.0
_DRAIN_BODIES = 8
_LAST_WORDS_SECONDS = 1.0


class ClientGoneError(Exception):
    """The client has closed the connection; nobody waits for the answer."""


class Answer:
    """An answer that is begun once, as one JSON object or as a stream of them.

    Args:
        scope: of the request.
        send: of ASGI. It waits while the client does not read what was sent before.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        self._abort = scope.get("state", {}).get("abort")
        self.status: int | None = None
        """Of the answer; ``None``: it has not begun."""
        self._is_stream = False

    async def whole(self, status: int, value: object, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        """Send a JSON object and end."""
        data = to_bytes(value)
        self.status = status
        length = (b"content-length", str(len(data)).encode())
        start = [(b"content-type", b"application/json"), length, *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": start})
        await self._send({"type": "http.response.body", "body": data})

    async def begin_stream(self) -> None:
        """Begin server-sent events."""
        self.status = 200
        self._is_stream = True
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})

    async def events(self, values: Sequence[object]) -> None:
        """Send one event a value, in one piece."""
        if values:
            data = b"".join(b"data: " + to_bytes(value) + b"\n\n" for value in values)
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end_stream(self) -> None:
        """Send the last event and end."""
        await self._send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def fail(self, error: ApiError, *, closes: bool = False) -> None:
        """Tell the client, in the way that is still possible. One that does not read is cut off.

        Args:
            error: what to say.
            closes: close the connection afterwards.
        """
        try:
            async with asyncio.timeout(_LAST_WORDS_SECONDS):
                if self.status is None:
                    headers = [(b"connection", b"close")] if closes else []
                    if error.status == 401:
                        headers.append((b"www-authenticate", b"Bearer"))
                    if error.status in (429, 503):
                        headers.append((b"retry-after", b"1"))
                    await self.whole(error.status, error.body(), headers)
                elif self._is_stream:
                    await self.events([error.body()])
                    await self._send({"type": "http.response.body", "body": b""})
        except TimeoutError:
            if self._abort is not None:
                self._abort()


async def read_body(headers: Headers, receive: Receive, options: ServerOptions) -> bytes:
    """Read the body of a request.

    Raises:
        ApiError: not JSON by its type, too large, or too slow. A body that is too large has been read a little further
            then, because many clients read the answer only when they have sent all.
        ClientGoneError: the client left while sending.
    """
    if headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the Content-Type has to be application/json", code="unsupported_media_type")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise ApiError(415, "bodies are taken as they are, without a Content-Encoding", code="unsupported_encoding")
    most = options.max_body_bytes
    length = headers.get("content-length", "")
    chunks: list[bytes] = []
    size = int(length) if length.isdecimal() and len(length) < 20 else 0
    try:
        async with asyncio.timeout(options.body_seconds):
            if size <= most:
                size, is_last = 0, False
                while not is_last and size <= most:
                    chunk, is_last = await _receive(receive)
                    chunks.append(chunk)
                    size += len(chunk)
    except TimeoutError as error:
        raise ApiError(408, f"the body took more than {options.body_seconds:g} seconds", code="timeout") from error
    if size > most:
        chunks.clear()
        await _drain(receive, most * _DRAIN_BODIES)
        raise ApiError(413, f"the body has more than {most} bytes", code="body_too_large")
    return b"".join(chunks)


async def until_gone(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work as long as the client is there; the request's body has to be read already.

    Raises:
        ClientGoneError: the client left, and the work was cancelled. Errors of the work pass through.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_until_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        task.result()
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _receive(receive: Receive) -> tuple[bytes, bool]:
    message = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGoneError
    return message.get("body", b""), not message.get("more_body", False)


async def _drain(receive: Receive, most: int) -> None:
    size, is_last = 0, False
    try:
        async with asyncio.timeout(_DRAIN_SECONDS):
            while not is_last and size <= most:
                chunk, is_last = await _receive(receive)
                size += len(chunk)
    except TimeoutError:
        return


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
