"""Text to tokens and back, token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.inference.hugging_face import write_tokenizer

from graphstep.errors import DataError
from graphstep.inference.text import ByteText, HuggingFaceText, TextTokens

# The letters that a tokenizer of bytes writes for the bytes of characters outside of ASCII.
_LETTERS_OF_BYTES = [chr(number) for number in (*range(0x21, 0x7F), *range(0xA1, 0x144))]


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


@given(words=st.text(max_size=12))
def test_the_bytes_of_tokens_are_the_text(words: str, tokenizer: HuggingFaceText) -> None:
    words = words.encode("utf-8", "ignore").decode()
    for text, tokens in ((tokenizer, tokenizer.encode(words)), (ByteText(), ByteText().encode(words))):
        assert b"".join(text.bytes_of(token) or b"" for token in tokens) == words.encode()
    assert ByteText().bytes_of(256) == tokenizer.bytes_of(1) == b""
    assert all(tokenizer.bytes_of(token) is not None for token in range(tokenizer.vocabulary))


def test_halves_of_pairs_are_no_text(tokenizer: HuggingFaceText) -> None:
    """Bytes of a command line come as such."""
    for text in (tokenizer, ByteText()):
        assert "".join(pieces(text, text.encode("a\udcffb\ud800c"))).count("a") == 1
    assert ByteText().encode("\udcff") == [0xFF]
    assert tokenizer.encode("\udcff") == tokenizer.encode("\N{REPLACEMENT CHARACTER}" * 3)


def test_tokens_without_text(tokenizer: HuggingFaceText) -> None:
    hello = tokenizer.encode("hello")[1:]
    assert "".join(pieces(tokenizer, [0, *hello, 1, tokenizer.vocabulary + 5, -1])) == "hello"
    assert tokenizer.token("<end>") == 1
    assert tokenizer.token("no token") is None


def test_a_character_that_is_never_complete(tokenizer: HuggingFaceText) -> None:
    tokens = tokenizer.encode("🙂")[1:]
    assert len(tokens) > 1
    assert pieces(tokenizer, tokens[:-1])[-1].startswith("\N{REPLACEMENT CHARACTER}")


def longest_window(text: HuggingFaceText, tokens: list[int]) -> tuple[str, int]:
    """The text of tokens that come one by one, and the most tokens that were decoded for one of them."""
    windows: list[int] = []
    stream = text.stream()
    decode = stream._decode  # type: ignore[attr-defined]

    def watched(ids: list[int]) -> str:
        windows.append(len(ids))
        return str(decode(ids))

    stream._decode = watched  # type: ignore[attr-defined]
    words = "".join([*(stream.add(token) for token in tokens), stream.finish()])
    return words, max(windows)


@given(data=st.data())
def test_bytes_that_are_no_text_are_not_held_for_ever(data: st.DataObject, tokenizer: HuggingFaceText) -> None:
    byte_tokens = [token for token in (tokenizer.token(each) for each in _LETTERS_OF_BYTES) if token is not None]
    assert len(byte_tokens) > 100
    tokens = data.draw(st.lists(st.sampled_from(byte_tokens), max_size=60))
    words, longest = longest_window(tokenizer, tokens)
    assert words == tokenizer._decode(tokens)
    assert longest <= 30


def test_a_character_after_many_bytes_that_are_no_text(tokenizer: HuggingFaceText) -> None:
    smile = tokenizer.encode("🙂")[1:]
    for number in range(40):
        words, longest = longest_window(tokenizer, [smile[1]] * number + smile + tokenizer.encode(" hello")[1:])
        assert words.endswith("🙂 hello")
        assert words.count("\N{REPLACEMENT CHARACTER}") == number
        assert longest <= 30


def test_tokens_without_text_are_not_held_for_ever(tokenizer: HuggingFaceText) -> None:
    hello, world = tokenizer.encode("hello")[1:], tokenizer.encode(" world")[1:]
    words, longest = longest_window(tokenizer, hello + [1] * 200 + world)
    assert words == "hello world"
    assert longest <= 30


@pytest.mark.parametrize("num_invalid", [0, 3, 50])
def test_decoders_that_fall_back_to_bytes(num_invalid: int, tmp_path: Path) -> None:
    """As of Llama 2: spaces are letters of words, and bytes are tokens of their own."""
    from tokenizers import Tokenizer, decoders, models

    words = {"\N{LOWER ONE EIGHTH BLOCK}hello": 256, "<unk>": 257}
    backend = Tokenizer(models.WordLevel({f"<0x{n:02X}>": n for n in range(256)} | words, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.save(str(tmp_path / "tokenizer.json"))
    text = HuggingFaceText(tmp_path / "tokenizer.json")
    smile = list("🙂".encode())
    tokens = [256, *[0xFF] * num_invalid, 256, *smile, *smile, 256, *[257] * 3]
    assert text.bytes_of(256) == b" hello"
    assert text.bytes_of(0xFF) == b"\xff"
    assert text.bytes_of(0x41) == b"A"
    found, longest = longest_window(text, tokens)
    assert (
        found
        == text._decode(tokens)
        == "hello" + "\N{REPLACEMENT CHARACTER}" * num_invalid + " hello🙂🙂 hello<unk><unk><unk>"
    )
    assert longest <= 40


def test_files_that_are_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        HuggingFaceText(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="not a tokenizer file"):
        HuggingFaceText(tmp_path / "tokenizer.json")
