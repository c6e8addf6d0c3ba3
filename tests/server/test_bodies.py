"""Whatever a client sends as JSON is either understood or refused with a reason that can be sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphstep.inference.requests import SEED_RANGE
from graphstep.server.bodies import ChatBody, CompletionBody, read_chat, read_completion, read_json
from graphstep.server.errors import ApiError
from graphstep.server.replies import to_bytes

FIELDS = (
    *(
        "model",
        "prompt",
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "top_k",
        "n",
        "seed",
    ),
    *("stop", "stop_token_ids", "ignore_eos", "stream", "stream_options", "logprobs", "top_logprobs", "echo", "user"),
    *("presence_penalty", "logit_bias", "tools", "response_format", "best_of", "what"),
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=()), max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("role", "content", "type", "text", "include_usage", "x")), inner, max_size=3)
    ),
    max_leaves=8,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6)
MESSAGES = [{"role": "user", "content": "x"}]


def refusal(read: Callable[[], object]) -> ApiError | None:
    try:
        read()
    except ApiError as error:
        return error
    return None


@settings(max_examples=400, deadline=None)
@given(BODIES, st.booleans())
def test_any_body_is_read_or_refused(body: dict[str, Any], is_chat: bool) -> None:
    start: dict[str, Any] = {"messages": MESSAGES} if is_chat else {"prompt": "x"}

    def read() -> None:
        found: ChatBody | CompletionBody = read_chat(start | body) if is_chat else read_completion(start | body)
        for copy in range(2):
            sampling = found.wanted.sampling(copy, max_new_tokens=4, end_tokens=[1])
            assert sampling.seed is None or sampling.seed in SEED_RANGE

    error = refusal(read)
    if error is not None:
        assert error.status == 400
        told = json.loads(to_bytes(error.body()))["error"]
        assert told["message"]
        assert told["type"] == "invalid_request_error"


@given(st.binary(max_size=40))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    error = refusal(lambda: read_json(data))
    assert error is None or error.status == 400


def test_copies_draw_with_the_next_seeds() -> None:
    wanted = read_completion({"prompt": "x", "seed": SEED_RANGE.stop - 1, "n": 2}).wanted
    seeds = [wanted.sampling(copy, max_new_tokens=1, end_tokens=()).seed for copy in range(2)]
    assert seeds == [SEED_RANGE.stop - 1, SEED_RANGE.start]
    wanted = read_completion({"prompt": "x", "n": 2}).wanted
    assert wanted.sampling(1, max_new_tokens=1, end_tokens=()).seed is None


def test_end_tokens_can_be_ignored_but_not_those_that_are_asked_for() -> None:
    for ignores, tokens in ((False, (5, 1)), (True, (5,))):
        wanted = read_completion({"prompt": "x", "stop_token_ids": [5], "ignore_eos": ignores}).wanted
        assert wanted.sampling(0, max_new_tokens=1, end_tokens=[1]).stop_tokens == tokens


def test_all_problems_in_one_message() -> None:
    with pytest.raises(ApiError) as caught:
        read_chat(
            {"messages": [{"role": "nobody"}], "temperature": "hot", "stream": 1, "tools": [{}], "top_logprobs": 3}
        )
    for part in ("messages[0] must be", "temperature must be", "stream must be", "tools is not", "needs logprobs"):
        assert part in caught.value.what
    assert caught.value.param == "tools"


def test_null_stands_for_a_field_left_out() -> None:
    others = ("prompt", "messages", "max_completion_tokens", "top_logprobs", "what")
    nothing = dict.fromkeys(name for name in FIELDS if name not in others)
    assert read_completion({"prompt": "x", **nothing}) == read_completion({"prompt": "x"})
