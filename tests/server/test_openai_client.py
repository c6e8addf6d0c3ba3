"""The server as OpenAI's own client sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.inference.generation import greedy
from tests.server.serving import NAME, RunningServer

from graphstep.inference.text import ByteText

openai = pytest.importorskip("openai")


@pytest.fixture
def client(server: RunningServer) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20) as client:
        yield client


def text_of(tokens: list[int]) -> str:
    stream = ByteText().stream()
    return "".join([*(stream.add(token) for token in tokens), stream.finish()])


def expected(server: RunningServer, prompt: str, num_tokens: int) -> str:
    """What the engine gives without a server."""
    return text_of(server.engine.generate([ByteText().encode(prompt)], greedy(num_tokens))[0].output_tokens)


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


def test_completion_is_what_the_engine_gives(client: Any, server: RunningServer) -> None:
    wanted = expected(server, "hello", 12)
    answer = client.completions.create(model=NAME, prompt="hello", max_tokens=12, temperature=0)
    assert answer.choices[0].text == wanted
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 12)


def test_streamed_completion_is_the_same(client: Any, server: RunningServer) -> None:
    wanted = expected(server, "hello", 12)
    options = {"include_usage": True}
    chunks = list(
        client.completions.create(
            model=NAME, prompt="hello", max_tokens=12, temperature=0, stream=True, stream_options=options
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == wanted
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason] == [
        "length"
    ]
    assert chunks[-1].usage.completion_tokens == 12
    assert len(chunks) > 3


def test_prompts_and_copies_come_in_order(client: Any, server: RunningServer) -> None:
    alone = [
        client.completions.create(model=NAME, prompt=prompt, max_tokens=6, seed=seed).choices[0].text
        for prompt in ("ab", "cd")
        for seed in (5, 6)
    ]
    together = client.completions.create(model=NAME, prompt=["ab", "cd"], n=2, max_tokens=6, seed=5)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in together.choices] == alone
    assert together.usage.prompt_tokens == 4
    chunks = client.completions.create(model=NAME, prompt=["ab", "cd"], n=2, max_tokens=6, seed=5, stream=True)
    texts = [""] * 4
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == alone


def test_prompt_of_tokens(client: Any, server: RunningServer) -> None:
    answers = [
        client.completions.create(model=NAME, prompt=prompt, max_tokens=5, temperature=0).choices[0].text
        for prompt in ("hey", list(b"hey"), [list(b"hey")])
    ]
    assert answers[0] == answers[1] == answers[2]


def test_stop_text_ends_a_text_and_the_request(client: Any, server: RunningServer) -> None:
    whole = expected(server, "hello", 24)
    place = next(i for i in range(4, 20) if whole[i] != "\ufffd" and whole[i] not in whole[:i])
    for streams in (False, True):
        answer = client.completions.create(
            model=NAME, prompt="hello", max_tokens=90, temperature=0, stop=["never", whole[place]], stream=streams
        )
        pieces = list(answer) if streams else [answer]
        assert "".join(piece.choices[0].text for piece in pieces) == whole[:place]
        assert pieces[-1].choices[0].finish_reason == "stop"


def test_stop_token_is_no_part_of_the_text(client: Any, server: RunningServer) -> None:
    tokens = server.engine.generate([list(b"hello")], greedy(8))[0].output_tokens
    place = next(i for i in range(2, 8) if tokens[i] not in tokens[:i])
    extra = {"stop_token_ids": [tokens[place]]}
    answer = client.completions.create(model=NAME, prompt="hello", max_tokens=8, temperature=0, extra_body=extra)
    assert answer.choices[0].text == text_of(tokens[:place])
    assert answer.choices[0].finish_reason == "stop"


def test_logprobs(client: Any, server: RunningServer) -> None:
    answer = client.completions.create(model=NAME, prompt="hello", max_tokens=4, temperature=0, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 4
    assert [max(top.values()) for top in logprobs.top_logprobs] == logprobs.token_logprobs
    assert all(value < 0 for value in logprobs.token_logprobs)
    messages = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(model=NAME, messages=messages, max_tokens=4, logprobs=True, top_logprobs=2)
    assert [len(each.top_logprobs) for each in chat.choices[0].logprobs.content] == [2] * 4


def test_bytes_of_tokens_that_are_parts_of_characters(client: Any, server: RunningServer) -> None:
    """The tokens here are bytes; the most likely ones of a random model are often no character."""
    tokens = server.engine.generate([list(b"hello")], greedy(40))[0].output_tokens
    assert max(tokens) >= 0x80, "choose a prompt that leads to such bytes"
    answer = client.completions.create(model=NAME, prompt="hello", max_tokens=40, temperature=0, logprobs=5)
    logprobs = answer.choices[0].logprobs
    names = [chr(token) if token < 0x80 else f"bytes:\\x{token:02x}" for token in tokens]
    assert logprobs.tokens == names
    assert [len(top) for top in logprobs.top_logprobs] == [5] * 40
    messages = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(model=NAME, messages=messages, max_tokens=40, temperature=0, logprobs=True)
    data = b"".join(bytes(each.bytes) for each in chat.choices[0].logprobs.content)
    assert data.decode("utf-8", "replace") == chat.choices[0].message.content


def test_chat_in_the_plain_form(client: Any, server: RunningServer) -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]
    wanted = expected(server, "system: Be short.\nuser: Hi\nassistant:", 10)
    answer = client.chat.completions.create(model=NAME, messages=messages, max_completion_tokens=10, temperature=0)
    assert answer.choices[0].message.content == wanted
    assert answer.choices[0].message.role == "assistant"
    chunks = list(
        client.chat.completions.create(model=NAME, messages=messages, max_tokens=10, temperature=0, stream=True)
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted
    assert chunks[-1].choices[0].finish_reason == "length"


def test_chat_without_a_limit_goes_to_the_end_of_the_context(client: Any, server: RunningServer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    answer = client.chat.completions.create(
        model=NAME, messages=messages, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == server.engine.limits.max_sequence_length


def test_prompts_that_were_computed_before_are_reported(client: Any, server: RunningServer) -> None:
    prompt = "a prompt of many blocks"
    for least in (0, 8):
        answer = client.completions.create(model=NAME, prompt=prompt, max_tokens=2)
        assert answer.usage.prompt_tokens_details.cached_tokens >= least


def test_errors_are_those_of_the_client(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.completions.create(model=NAME, prompt="x", temperature=-1)
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.completions.create(model="another", prompt="x")
    with pytest.raises(openai.BadRequestError, match="at most 95"):
        client.completions.create(model=NAME, prompt="x" * 96)
    tools = [{"type": "function", "function": {"name": "f"}}]
    with pytest.raises(openai.BadRequestError, match="tools is not supported"):
        client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": "x"}], tools=tools)
    with pytest.raises(openai.BadRequestError, match="32 sequences in one request"):
        client.completions.create(model=NAME, prompt=["x"] * 8, n=4)
