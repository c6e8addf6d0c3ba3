"""The JSON objects of answers, by OpenAI's interface."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from graphstep.server.generation import Piece, TokenDetail, Usage
from graphstep.server.model import ServedModel

Json = dict[str, Any]


def to_bytes(value: object) -> bytes:
    """Return JSON in ASCII; half a surrogate pair in a client's own words would be no UTF-8."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


class Reply(Protocol):
    """How an endpoint writes its answers."""

    def first_chunks(self, num_choices: int) -> Sequence[Json]:
        """Return what a stream begins with."""

    def chunk(self, piece: Piece) -> Json:
        """Return what a stream says of a piece."""

    def usage_chunk(self, usage: Usage) -> Json:
        """Return the last object of a stream that was to tell its usage."""

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> Json:
        """Return an answer that is no stream, from one joined piece a sequence."""


class CompletionReply:
    """Answers of ``/v1/completions``."""

    def __init__(self, model: ServedModel, *, has_logprobs: bool) -> None:
        self._model = model
        self._has_logprobs = has_logprobs
        self._head = _head("cmpl", "text_completion", model.name)

    def first_chunks(self, num_choices: int) -> Sequence[Json]:
        """Return nothing: the first piece says it all."""
        return ()

    def chunk(self, piece: Piece) -> Json:
        """Return an object with one choice."""
        return {**self._head, "choices": [self._choice(piece)]}

    def usage_chunk(self, usage: Usage) -> Json:
        """Return an object without choices."""
        return {**self._head, "choices": [], "usage": _usage(usage)}

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> Json:
        """Return an object with all choices."""
        return {**self._head, "choices": [self._choice(piece) for piece in pieces], "usage": _usage(usage)}

    def _choice(self, piece: Piece) -> Json:
        logprobs = self._logprobs(piece.details) if self._has_logprobs else None
        return {"index": piece.index, "text": piece.text, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _logprobs(self, details: Sequence[TokenDetail]) -> Json:
        name_of = self._model.name_of  # texts alone would make one key of all parts of characters
        return {
            "tokens": [name_of(detail.token) for detail in details],
            "token_logprobs": [detail.logprob for detail in details],
            "top_logprobs": [
                {name_of(token): logprob for token, logprob in reversed(detail.top)} for detail in details
            ],
            "text_offset": [detail.offset for detail in details],
        }


class ChatReply:
    """Answers of ``/v1/chat/completions``."""

    def __init__(self, model: ServedModel, *, has_logprobs: bool) -> None:
        self._model = model
        self._has_logprobs = has_logprobs
        self._head = _head("chatcmpl", "chat.completion", model.name)
        self._stream_head = {**self._head, "object": "chat.completion.chunk"}

    def first_chunks(self, num_choices: int) -> Sequence[Json]:
        """Return who speaks, for each choice."""
        opening = {"role": "assistant", "content": ""}
        return [
            {
                **self._stream_head,
                "choices": [{"index": index, "delta": opening, "logprobs": None, "finish_reason": None}],
            }
            for index in range(num_choices)
        ]

    def chunk(self, piece: Piece) -> Json:
        """Return an object with one choice."""
        delta = {"content": piece.text} if piece.text or piece.details else {}
        return {**self._stream_head, "choices": [{**self._choice(piece), "delta": delta}]}

    def usage_chunk(self, usage: Usage) -> Json:
        """Return an object without choices."""
        return {**self._stream_head, "choices": [], "usage": _usage(usage)}

    def whole(self, pieces: Sequence[Piece], usage: Usage) -> Json:
        """Return an object with all choices."""
        choices = [
            {**self._choice(piece), "message": {"role": "assistant", "content": piece.text, "refusal": None}}
            for piece in pieces
        ]
        return {**self._head, "choices": choices, "usage": _usage(usage)}

    def _choice(self, piece: Piece) -> Json:
        logprobs = None
        if self._has_logprobs:
            content = [
                {
                    **self._token(detail.token, detail.logprob),
                    "top_logprobs": [self._token(token, logprob) for token, logprob in detail.top],
                }
                for detail in piece.details
            ]
            logprobs = {"content": content, "refusal": None}
        return {"index": piece.index, "logprobs": logprobs, "finish_reason": piece.finish_reason}

    def _token(self, token: int, logprob: float) -> Json:
        data = self._model.text.bytes_of(token)
        return {
            "token": self._model.text_of(token),
            "logprob": logprob,
            "bytes": None if data is None else list(data),
        }


def models_reply(model: ServedModel) -> Json:
    """Return the answer of ``/v1/models``."""
    return {"object": "list", "data": [model_reply(model)]}


def model_reply(model: ServedModel) -> Json:
    """Return the answer of ``/v1/models/NAME``."""
    return {"id": model.name, "object": "model", "created": model.created, "owned_by": "graphstep"}


def _head(prefix: str, kind: str, model: str) -> Mapping[str, Any]:
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "object": kind, "created": int(time.time()), "model": model}


def _usage(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
