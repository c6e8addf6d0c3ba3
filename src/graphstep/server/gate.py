"""What comes before every path: requests that must not be read in two ways, pages of browsers, and counting."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graphstep.server.answers import Answer
from graphstep.server.errors import ApiError
from graphstep.server.metrics import Metrics

COUNTED: Final = "graphstep.counted"
"""Key of a scope whose answer has been counted by who gave it."""
_PATHS: Final = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics")
_OTHER: Final = "other"


class Gate:
    """Refuses what no path should see, and counts answers that nobody has counted.

    A body with a length and in chunks is one to this server and may be two to a proxy in front of it: what is behind
    its end would then be a request that nobody has checked. A page that a browser shows can reach this machine by a
    name that it has made to mean this machine; its requests then carry the page's origin.

    Args:
        app: what is behind it.
        metrics: returns where to count.
        asks_for_origin: refuse requests of pages from elsewhere, because nothing else would.
    """

    def __init__(self, app: ASGIApp, *, metrics: Callable[[], Metrics], asks_for_origin: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._asks_for_origin = asks_for_origin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a request on, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        problem = self._problem(Headers(scope=scope))
        try:
            if problem is None:
                await self._app(scope, receive, noting)
            else:
                await Answer(scope, noting).fail(problem, closes=True)
        finally:
            if COUNTED not in scope:
                self._metrics().count_status(_label(scope["path"]), status)

    def _problem(self, headers: Headers) -> ApiError | None:
        if "transfer-encoding" in headers and "content-length" in headers:
            return ApiError(400, "a body has a Content-Length or a Transfer-Encoding, not both", code="two_lengths")
        origin = headers.get("origin")
        if self._asks_for_origin and origin is not None and not _is_of_this_machine(origin):
            what = "requests of pages from elsewhere need an API key (--api-key-file)"
            return ApiError(403, what, code="foreign_origin")
        return None


def _is_of_this_machine(origin: str) -> bool:
    try:
        host = urlsplit(origin).hostname or ""
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _label(path: str) -> str:
    """Of a few: whoever asks for paths at random must not make a counter for each."""
    return next((known for known in _PATHS if path == known or path.startswith(f"{known}/")), _OTHER)
