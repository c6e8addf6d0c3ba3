"""The two endpoints that generate."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from graphstep.errors import RequestError
from graphstep.inference.engine import DynamicEngine
from graphstep.server.answers import Answer, ClientGoneError, read_body, until_gone
from graphstep.server.bodies import Wanted, from_request_error, read_chat, read_completion, read_json
from graphstep.server.errors import ApiError
from graphstep.server.gate import COUNTED
from graphstep.server.generation import Generation, Piece
from graphstep.server.metrics import Metrics
from graphstep.server.model import ServedModel
from graphstep.server.options import ServerOptions
from graphstep.server.replies import ChatReply, CompletionReply, Reply
from graphstep.server.worker import EngineWorker

CLIENT_GONE = 499
"""Status that is counted, not sent."""
_LONG_TEXT = 1 << 14
"""Characters above which a text is tokenised beside the event loop."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """What all requests share while a server runs."""

    worker: EngineWorker
    model: ServedModel
    options: ServerOptions
    metrics: Metrics
    longest: int
    """Most tokens of a sequence."""
    longest_prompt: int
    """Most tokens of a prompt."""

    @classmethod
    def of(cls, worker: EngineWorker, engine: DynamicEngine, model: ServedModel, options: ServerOptions) -> Serving:
        """Work out the limits; nothing of the engine is kept."""
        blocks = engine.blocks
        longest = min(engine.limits.max_sequence_length, blocks.capacity * blocks.block_size + 1)
        most = options.max_prompt_tokens
        return cls(
            worker=worker,
            model=model,
            options=options,
            metrics=Metrics(),
            longest=longest,
            longest_prompt=longest - 1 if most is None else min(most, longest - 1),
        )


@dataclass(frozen=True, slots=True)
class _Prepared:
    wanted: Wanted
    prompts: Sequence[Sequence[int]]
    stop: tuple[str, ...]
    reply: Reply


class GenerationEndpoint:
    """An ASGI application that answers requests for generation.

    Args:
        serving: returns what requests share; called with each.
        is_chat: which of the two it is.
    """

    def __init__(self, serving: Callable[[], Serving], *, is_chat: bool) -> None:
        self._serving = serving
        self._prepare = _prepare_chat if is_chat else _prepare_completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; nothing of it is left in the engine afterwards."""
        serving = self._serving()
        options, metrics = serving.options, serving.metrics
        answer = Answer(scope, send)
        start = time.monotonic()
        metrics.num_open += 1
        status = 500
        try:
            async with asyncio.timeout(options.request_seconds):
                body = await read_body(Headers(scope=scope), receive, options)
                await until_gone(receive, self._answer(serving, body, answer))
            status = answer.status or status
        except ClientGoneError:
            status = CLIENT_GONE
        except ApiError as error:
            status = error.status
            await answer.fail(error, closes=error.status in (408, 413))
        except TimeoutError:
            status = 504
            what = f"the request took more than {options.request_seconds:g} seconds"
            await answer.fail(ApiError(504, what, code="timeout"), closes=True)
        except asyncio.CancelledError:
            status = 503
            await answer.fail(ApiError(503, "the server is stopping"), closes=True)
        except Exception:
            _log.exception("a request failed")
            await answer.fail(ApiError(500, "the server failed; its log says more"))
        finally:
            metrics.num_open -= 1
            scope[COUNTED] = True
            metrics.count_answer(scope["path"], status, time.monotonic() - start)

    async def _answer(self, serving: Serving, data: bytes, answer: Answer) -> None:
        prepared = await self._prepare(serving, read_json(data))
        generation = _generation(serving, prepared)
        try:
            try:
                await generation.start()
            except RequestError as error:
                raise from_request_error(error) from error
            if prepared.wanted.streams:
                await _stream(generation, prepared, answer)
            else:
                await _whole(generation, prepared, answer)
        finally:
            generation.close()


async def _prepare_completion(serving: Serving, body: Mapping[str, Any]) -> _Prepared:
    asked = read_completion(body)
    _check_model(serving, asked.wanted)
    _check_choices(serving, len(asked.prompts) * asked.wanted.n)
    prompts = [await _encode(serving, prompt) if isinstance(prompt, str) else prompt for prompt in asked.prompts]
    _check_lengths(serving, prompts, "prompt")
    reply = CompletionReply(serving.model, has_logprobs=asked.wanted.num_logprobs is not None)
    return _Prepared(asked.wanted, prompts, asked.wanted.stop, reply)


async def _prepare_chat(serving: Serving, body: Mapping[str, Any]) -> _Prepared:
    asked = read_chat(body)
    _check_model(serving, asked.wanted)
    _check_choices(serving, asked.wanted.n)
    chat = serving.model.chat
    # A template is a program of the model's: it may take long.
    text = (
        chat.render(asked.messages) if chat.template is None else await asyncio.to_thread(chat.render, asked.messages)
    )
    prompts = [await _encode(serving, text, is_chat=True)]
    _check_lengths(serving, prompts, "messages")
    reply = ChatReply(serving.model, has_logprobs=asked.wanted.num_logprobs is not None)
    return _Prepared(asked.wanted, prompts, (*asked.wanted.stop, *chat.stop), reply)


async def _encode(serving: Serving, text: str, *, is_chat: bool = False) -> list[int]:
    if len(text) < _LONG_TEXT:
        return serving.model.encode(text, is_chat=is_chat)
    return await asyncio.to_thread(serving.model.encode, text, is_chat=is_chat)


def _check_model(serving: Serving, wanted: Wanted) -> None:
    name = serving.model.name
    if wanted.model is not None and wanted.model != name:
        what = f"there is no model {wanted.model[:200]!r}; this server has {name!r}"
        raise ApiError(404, what, param="model", code="model_not_found")


def _check_choices(serving: Serving, number: int) -> None:
    # More than there can ever be places for would be told to try again later, for ever.
    most = min(serving.options.max_choices, serving.worker.capacity)
    if number > most:
        raise ApiError(400, f"{number} sequences in one request; at most {most} are allowed", param="n")


def _check_lengths(serving: Serving, prompts: Sequence[Sequence[int]], param: str) -> None:
    longest = max(map(len, prompts))
    if longest > serving.longest_prompt:
        what = f"a prompt of {longest} tokens; at most {serving.longest_prompt} are allowed"
        raise ApiError(400, what, param=param, code="context_length_exceeded")


def _generation(serving: Serving, prepared: _Prepared) -> Generation:
    wanted = prepared.wanted
    sequences = []
    for prompt in prepared.prompts:
        room = serving.longest - len(prompt)
        num_tokens = room if wanted.max_tokens is None else min(wanted.max_tokens, room)
        sequences += [
            (prompt, wanted.sampling(copy, max_new_tokens=num_tokens, end_tokens=serving.model.end_tokens))
            for copy in range(wanted.n)
        ]
    return Generation(
        serving.worker,
        serving.model.text,
        serving.metrics,
        sequences,
        num_copies=wanted.n,
        stop=prepared.stop,
    )


async def _stream(generation: Generation, prepared: _Prepared, answer: Answer) -> None:
    reply = prepared.reply
    await answer.begin_stream()
    await answer.events(reply.first_chunks(len(prepared.prompts) * prepared.wanted.n))
    async for pieces in generation.pieces():
        await answer.events([reply.chunk(piece) for piece in pieces])
    if prepared.wanted.includes_usage:
        await answer.events([reply.usage_chunk(generation.usage)])
    await answer.end_stream()


async def _whole(generation: Generation, prepared: _Prepared, answer: Answer) -> None:
    joined = [Piece(index, "") for index in range(len(prepared.prompts) * prepared.wanted.n)]
    texts: list[list[str]] = [[] for _ in joined]
    async for pieces in generation.pieces():
        for piece in pieces:
            texts[piece.index].append(piece.text)
            joined[piece.index].details += piece.details
            joined[piece.index].finish_reason = piece.finish_reason
    for piece, parts in zip(joined, texts, strict=True):
        piece.text = "".join(parts)
    await answer.whole(200, prepared.reply.whole(joined, generation.usage))
