"""Reads the JSON bodies of requests. What is not known or not supported is refused, never ignored."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from graphstep.errors import RequestError
from graphstep.inference.requests import SEED_RANGE, SamplingParams, later_seed
from graphstep.server.chat import Message
from graphstep.server.errors import ApiError

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_COMPLETION_LOGPROBS = 5
MAX_MESSAGES = 4096
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")

# Fields that change nothing at these values, and are refused at others.
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "min_p": (None, 0),
    "logit_bias": (None, {}),
    "suffix": (None, ""),
    "echo": (None, False),
    "best_of": (None, 1),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "reasoning_effort": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
}
_WITHOUT_EFFECT: Final = ("user", "metadata", "safety_identifier", "prompt_cache_key")
_SHARED: Final = (
    *("model", "max_tokens", "temperature", "top_p", "top_k", "n", "seed", "stop", "stop_token_ids", "ignore_eos"),
    *("stream", "stream_options", "logprobs"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a body asks for, whichever endpoint it came to."""

    model: str | None
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    n: int
    seed: int | None
    stop: tuple[str, ...]
    stop_tokens: tuple[int, ...]
    ignores_eos: bool
    streams: bool
    includes_usage: bool
    num_logprobs: int | None
    """Alternatives at each token; ``None``: no log-probabilities."""

    def sampling(self, copy: int, *, max_new_tokens: int, end_tokens: Sequence[int]) -> SamplingParams:
        """Return settings for one of the `n` sequences of a prompt; with a seed, each draws from the next one.

        Raises:
            ApiError: out of range; all problems in one message.
        """
        seed = None if self.seed is None else later_seed(self.seed, copy)
        try:
            return SamplingParams(
                max_new_tokens=max_new_tokens,
                temperature=self.temperature,
                top_k=self.top_k,
                top_p=self.top_p,
                seed=seed,
                stop_tokens=(*self.stop_tokens, *(() if self.ignores_eos else end_tokens)),
                logprobs=self.num_logprobs,
            )
        except RequestError as error:
            raise from_request_error(error) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionBody:
    """A body for ``/v1/completions``."""

    wanted: Wanted
    prompts: tuple[str | tuple[int, ...], ...]
    """Texts or tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatBody:
    """A body for ``/v1/chat/completions``."""

    wanted: Wanted
    messages: tuple[Message, ...]


def from_request_error(error: RequestError) -> ApiError:
    """Return what the client is told of a request that the engine refuses."""
    what = "; ".join(f"{each.what} ({each.fix})" if each.fix else each.what for each in error.problems)
    first = error.problems[0]
    code = "context_length_exceeded" if first.code in ("request-length", "request-step") else first.code
    return ApiError(400, what, param=first.where or None, code=code)


def read_json(data: bytes) -> Mapping[str, Any]:
    """Read a body.

    Raises:
        ApiError: not a JSON object.
    """
    try:
        body = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="malformed_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body has to be a JSON object", code="malformed_json")
    return body


def read_completion(body: Mapping[str, Any]) -> CompletionBody:
    """Read a body for ``/v1/completions``.

    Raises:
        ApiError: all problems in one message.
    """
    fields = _Fields(body, (*_SHARED, "prompt"))
    prompts = _prompts(fields)
    logprobs = fields.whole("logprobs", None, 0, MAX_COMPLETION_LOGPROBS)
    wanted = _wanted(fields, fields.whole("max_tokens", 16, 1, 2**31), logprobs)
    fields.check()
    return CompletionBody(wanted=wanted, prompts=prompts)


def read_chat(body: Mapping[str, Any]) -> ChatBody:
    """Read a body for ``/v1/chat/completions``.

    Raises:
        ApiError: all problems in one message.
    """
    fields = _Fields(body, (*_SHARED, "messages", "max_completion_tokens", "top_logprobs"))
    messages = _messages(fields)
    newer = fields.whole("max_completion_tokens", None, 1, 2**31)
    older = fields.whole("max_tokens", None, 1, 2**31)
    top = fields.whole("top_logprobs", None, 0, 20)
    has_logprobs = fields.truth("logprobs")
    if top is not None and not has_logprobs:
        fields.refuse("top_logprobs", "top_logprobs needs logprobs to be true")
    wanted = _wanted(fields, older if newer is None else newer, (top or 0) if has_logprobs else None)
    fields.check()
    return ChatBody(wanted=wanted, messages=messages)


class _Fields:
    """Takes fields out of a body and collects what is wrong with them. JSON's null stands for a field left out."""

    def __init__(self, body: Mapping[str, Any], known: Sequence[str]) -> None:
        self._body = body
        self._problems: list[tuple[str, str]] = []
        for name, value in body.items():
            if name in known or name in _WITHOUT_EFFECT:
                continue
            if name not in _NEUTRAL:
                self.refuse(name[:80], f"there is no field {name[:80]!r}")
            elif not any(value == neutral and type(value) in (type(neutral), float) for neutral in _NEUTRAL[name]):
                self.refuse(name, f"{name} is not supported")

    def get(self, name: str) -> Any:
        return self._body.get(name)

    def refuse(self, name: str, what: str) -> None:
        self._problems.append((name, what))

    def check(self) -> None:
        if self._problems:
            what = "; ".join(what for _, what in self._problems[:20])
            raise ApiError(400, what, param=self._problems[0][0], code="invalid_value")

    def whole(self, name: str, default: int | None, low: int, high: int) -> int | None:
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.refuse(name, f"{name} must be a whole number from {low} to {high}")
            return default
        return value

    def number(self, name: str, default: float, low: float, high: float) -> float:
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            self.refuse(name, f"{name} must be a number from {low:g} to {high:g}")
            return default
        return float(value)

    def truth(self, name: str) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            self.refuse(name, f"{name} must be true or false")
        return value is True

    def text(self, name: str, value: object) -> str:
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:  # JSON can spell half of a pair
                self.refuse(name, f"{name} contains half a surrogate pair, which is no text")
            else:
                return value
        else:
            self.refuse(name, f"{name} must be text")
        return ""


def _wanted(fields: _Fields, max_tokens: int | None, num_logprobs: int | None) -> Wanted:
    model = fields.get("model")
    stop = fields.get("stop")
    stop = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stop, list) or len(stop) > MAX_STOP_STRINGS:
        fields.refuse("stop", f"stop must be text or a list of at most {MAX_STOP_STRINGS} texts")
        stop = []
    stop = [fields.text("stop", each) for each in stop]
    if any(not 0 < len(each) <= MAX_STOP_CHARACTERS for each in stop):
        fields.refuse("stop", f"a stop text has 1 to {MAX_STOP_CHARACTERS} characters")
    tokens = fields.get("stop_token_ids") or []
    if not _are_tokens(tokens) or len(tokens) > MAX_STOP_STRINGS:
        fields.refuse("stop_token_ids", f"stop_token_ids must be a list of at most {MAX_STOP_STRINGS} token numbers")
        tokens = []
    options = fields.get("stream_options")
    includes_usage = False
    if options is not None:
        if not isinstance(options, dict) or not set(options) <= {"include_usage", "include_obfuscation"}:
            fields.refuse("stream_options", "stream_options is an object with include_usage")
        elif not fields.truth("stream"):
            fields.refuse("stream_options", "stream_options needs stream to be true")
        else:
            includes_usage = options.get("include_usage") is True
    return Wanted(
        model=None if model is None else fields.text("model", model),
        max_tokens=max_tokens,
        temperature=fields.number("temperature", 1.0, 0, 100),
        top_p=fields.number("top_p", 1.0, math.ulp(0.0), 1),
        top_k=max(0, fields.whole("top_k", 0, -1, 2**31 - 1) or 0),
        n=fields.whole("n", 1, 1, 2**16) or 1,
        seed=fields.whole("seed", None, SEED_RANGE.start, SEED_RANGE.stop - 1),
        stop=tuple(stop),
        stop_tokens=tuple(tokens),
        ignores_eos=fields.truth("ignore_eos"),
        streams=fields.truth("stream"),
        includes_usage=includes_usage,
        num_logprobs=num_logprobs,
    )


def _prompts(fields: _Fields) -> tuple[str | tuple[int, ...], ...]:
    value = fields.get("prompt")
    if isinstance(value, str):
        return (fields.text("prompt", value),)
    if isinstance(value, list) and value:
        if _are_tokens(value):
            return (tuple(value),)
        if all(isinstance(each, str) for each in value):
            return tuple(fields.text("prompt", each) for each in value)
        if all(_are_tokens(each) and each for each in value):
            return tuple(tuple(each) for each in value)
    fields.refuse("prompt", "prompt must be text, token numbers, or a list of either")
    return ()


def _are_tokens(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, int) and not isinstance(each, bool) and 0 <= each < 2**31 for each in value
    )


def _messages(fields: _Fields) -> tuple[Message, ...]:
    value = fields.get("messages")
    if not isinstance(value, list) or not 0 < len(value) <= MAX_MESSAGES:
        fields.refuse("messages", f"messages must be a list of 1 to {MAX_MESSAGES} messages")
        return ()
    messages = []
    for place, message in enumerate(value):
        where = f"messages[{place}]"
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            fields.refuse(where, f"{where} must be an object with a role: {', '.join(_ROLES)}")
            continue
        unknown = {name for name, given in message.items() if given is not None} - {"role", "content"}
        if unknown - {"name", "refusal"}:
            fields.refuse(where, f"{where} has fields that are not supported: {', '.join(sorted(unknown))[:200]}")
        content = message.get("content")
        if isinstance(content, list):
            content = _joined(fields, where, content)
        messages.append({"role": message["role"], "content": fields.text(f"{where}.content", content)})
    return tuple(messages)


def _joined(fields: _Fields, where: str, parts: Sequence[object]) -> str:
    texts = [part["text"] for part in parts if isinstance(part, dict) and part.get("type") == "text" and "text" in part]
    if len(texts) != len(parts):
        fields.refuse(f"{where}.content", f"{where}.content has parts that are not text")
        return ""
    return "".join(fields.text(f"{where}.content", text) for text in texts)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
