"""Text to tokens and back, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.inference.hugging_face import write_tokenizer

from graphstep.errors import DataError
from graphstep.inference.text import ByteText, HuggingFaceText, TextTokens


def pieces(text: TextTokens, tokens: list[int]) -> list[str]:
    stream = text.stream()
    return [*(stream.add(token) for token in tokens), stream.finish()]


@given(st.text())
def test_bytes_and_back(words: str) -> None:
    words = words.encode("utf-8", "ignore").decode()
    text = ByteText()
    assert "".join(pieces(text, text.encode(words))) == words


def test_a_character_comes_when_it_is_complete() -> None:
    assert pieces(ByteText(), list("aé€".encode())) == ["a", "", "é", "", "", "€", ""]
    assert pieces(ByteText(), [0xE2, 0x82]) == ["", "", "\N{REPLACEMENT CHARACTER}"]
    assert pieces(ByteText(), [65, 256, 300, 66]) == ["A", "", "", "B", ""]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceText:
    return HuggingFaceText(write_tokenizer(tmp_path_factory.mktemp("tokenizer")), stop_tokens=(1,))


@pytest.mark.parametrize("words", ["hello hello world", "  two  spaces", "naïve €uro 🙂 end", "", "\n\n"])
def test_the_pieces_are_the_text(words: str, tokenizer: HuggingFaceText) -> None:
    tokens = tokenizer.encode(words)
    assert tokens[0] == 0  # what the tokenizer puts in front
    parts = pieces(tokenizer, tokens)
    assert "".join(parts) == words
    assert all("\N{REPLACEMENT CHARACTER}" not in part for part in parts)


def test_tokens_without_text(tokenizer: HuggingFaceText) -> None:
    hello = tokenizer.encode("hello")[1:]
    assert "".join(pieces(tokenizer, [0, *hello, 1, tokenizer.vocabulary + 5, -1])) == "hello"
    assert tokenizer.token("<end>") == 1
    assert tokenizer.token("no token") is None


def test_a_character_that_is_never_complete(tokenizer: HuggingFaceText) -> None:
    tokens = tokenizer.encode("🙂")[1:]
    assert len(tokens) > 1
    assert pieces(tokenizer, tokens[:-1])[-1].startswith("\N{REPLACEMENT CHARACTER}")


def test_files_that_are_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        HuggingFaceText(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a tokenizer file"):
        HuggingFaceText(tmp_path / "tokenizer.json")
