"""The ASGI application: routes, API key, errors in the form of OpenAI's interface."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import AsyncIterator
from typing import Final

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from graphstep.errors import LifecycleError
from graphstep.inference.engine import DynamicEngine
from graphstep.server.answers import Answer
from graphstep.server.endpoints import GenerationEndpoint, Serving
from graphstep.server.errors import ApiError
from graphstep.server.gate import Gate
from graphstep.server.metrics import CONTENT_TYPE
from graphstep.server.model import EngineNumbers, ServedModel
from graphstep.server.options import ServerOptions
from graphstep.server.replies import model_reply, models_reply, to_bytes
from graphstep.server.worker import EngineWorker

HEALTH: Final = "/health"
_NUMBERS_SECONDS = 1.0


class ServerApp:
    """What a server answers. The engine runs in a thread from startup to shutdown of the application.

    Args:
        engine: nobody else may use it while the application runs; not closed here.
        model: what clients see.
        options: limits and key.
    """

    def __init__(self, engine: DynamicEngine, model: ServedModel, options: ServerOptions) -> None:
        self._engine = engine
        self._model = model
        self._options = options
        self._serving: Serving | None = None
        self._numbers: EngineNumbers | None = None

    def build(self) -> Starlette:
        """Return the application."""
        key = self._options.api_key
        gate = Middleware(
            Gate,
            metrics=lambda: self.serving().metrics,
            asks_for_origin=key is None and self._options.is_local,
        )
        return Starlette(
            routes=[
                Route("/v1/completions", GenerationEndpoint(self.serving, is_chat=False), methods=["POST"]),
                Route("/v1/chat/completions", GenerationEndpoint(self.serving, is_chat=True), methods=["POST"]),
                Route("/v1/models", self._list_models),
                Route("/v1/models/{name:path}", self._show_model),
                Route(HEALTH, self._health),
                Route("/metrics", self._show_metrics),
            ],
            middleware=[gate] if key is None else [gate, Middleware(KeyCheck, key=key)],
            exception_handlers={HTTPException: _http_error, ApiError: _api_error},
            lifespan=self._lifespan,
        )

    def serving(self) -> Serving:
        """Return what requests share.

        Raises:
            LifecycleError: the application has not been started.
        """
        if self._serving is None:
            raise LifecycleError("the application does not run", where="ServerApp", fix="start it with its lifespan")
        return self._serving

    def close(self) -> None:
        """End the thread of the engine, if the application was not shut down. May be called twice."""
        if self._serving is not None:
            self._serving.worker.close()

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        capacity = self._engine.limits.max_requests + self._options.max_queue
        worker = EngineWorker(self._engine, asyncio.get_running_loop(), capacity=capacity)
        self._serving = Serving.of(worker, self._engine, self._model, self._options)
        try:
            yield
        finally:
            await asyncio.to_thread(worker.close)  # waits for a step; answers are being written meanwhile

    async def _list_models(self, _: Request) -> Response:
        return _json(200, models_reply(self._model))

    async def _show_model(self, request: Request) -> Response:
        if request.path_params["name"] != self._model.name:
            raise ApiError(404, f"there is no such model; this server has {self._model.name!r}", code="model_not_found")
        return _json(200, model_reply(self._model))

    async def _health(self, _: Request) -> Response:
        problem = self.serving().worker.problem
        return _json(200 if problem is None else 503, {"status": problem or "ok"})

    async def _show_metrics(self, _: Request) -> Response:
        serving = self.serving()
        try:
            # A step that takes long (the capture of a graph) is not waited for: the last numbers serve.
            async with asyncio.timeout(_NUMBERS_SECONDS):
                self._numbers = await serving.worker.call(lambda: EngineNumbers.of(self._engine))
        except (TimeoutError, ApiError):
            pass
        text = serving.metrics.render(self._numbers, is_healthy=serving.worker.problem is None)
        return Response(text, headers={"content-type": CONTENT_TYPE})


class KeyCheck:
    """Lets in who knows the key; everybody may ask for health. Compares in a time that does not depend on the key.

    Args:
        app: what is behind it.
        key: what has to be sent.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a request on, or refuse it."""
        if scope["type"] == "http" and scope["path"] != HEALTH:
            scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
            is_known = hmac.compare_digest(given.strip().encode("latin-1"), self._key)
            if not (is_known and scheme.lower() == "bearer"):
                what = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'"
                await Answer(scope, send).fail(ApiError(401, what, code="invalid_api_key"), closes=True)
                return
        await self._app(scope, receive, send)


def _json(status: int, value: object) -> Response:
    return Response(to_bytes(value), status, media_type="application/json")


async def _http_error(_: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = {404: "there is nothing at this path", 405: "this path does not take this method"}.get(status, str(error))
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return Response(to_bytes(ApiError(status, what).body()), status, headers, media_type="application/json")


async def _api_error(_: Request, error: Exception) -> Response:
    known = error if isinstance(error, ApiError) else ApiError(500, "the server failed")
    return _json(known.status, known.body())
