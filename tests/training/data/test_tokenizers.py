from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphstep.errors import DataError
from graphstep.training.data import ByteTokenizer, HuggingFaceTokenizer, build_tokenizer

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(TEXT)
def test_bytes_round_trip(text: str) -> None:
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text)
    assert tokens.dtype == np.int64
    assert tokens.tolist() == list(text.encode())
    assert tokenizer.decode(tokens) == text
    assert tokenizer.encode_batch([text, ""])[0].tolist() == tokens.tolist()


def test_bytes_decode_leaves_out_what_is_no_byte() -> None:
    tokenizer = ByteTokenizer()
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.decode([104, tokenizer.eod, 105, 300, -1]) == "hi"
    assert tokenizer.decode([0xFF]) == "\ufffd"


@given(texts=st.lists(TEXT, max_size=4))
def test_huggingface_round_trip(huggingface_tokenizer: HuggingFaceTokenizer, texts: list[str]) -> None:
    batch = huggingface_tokenizer.encode_batch(texts)
    for text, tokens in zip(texts, batch, strict=True):
        assert tokens.tolist() == huggingface_tokenizer.encode(text).tolist()
        assert huggingface_tokenizer.decode(tokens) == text
        assert ((tokens >= 0) & (tokens < huggingface_tokenizer.vocab_size)).all()


def test_huggingface_finds_the_file_in_a_folder_and_its_eod(tokenizer_json: Path) -> None:
    by_file, by_folder = HuggingFaceTokenizer(tokenizer_json), HuggingFaceTokenizer(tokenizer_json.parent)
    assert by_file.identity == by_folder.identity
    assert by_file.has_own_eod
    assert by_file.eod == 0
    assert by_file.vocab_size == 1 + 256 + 60
    assert by_file.decode([by_file.eod, *by_file.encode("so it is").tolist(), 5000]) == "so it is"


def test_huggingface_without_eod_gets_one(tokenizer_json: Path) -> None:
    content = tokenizer_json.read_text().replace("<|endoftext|>", "<odd>")
    tokenizer_json.write_text(content)
    tokenizer = HuggingFaceTokenizer(tokenizer_json)
    assert not tokenizer.has_own_eod
    assert tokenizer.eod == tokenizer.vocab_size - 1 == 317
    assert HuggingFaceTokenizer(tokenizer_json, eod_token="<odd>").eod == 0
    with pytest.raises(DataError, match="no token 'none'"):
        HuggingFaceTokenizer(tokenizer_json, eod_token="none")


def test_huggingface_neither_cuts_nor_pads(tokenizer_json: Path) -> None:
    content = json.loads(tokenizer_json.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 64},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    tokenizer_json.write_text(json.dumps(content))
    tokenizer = HuggingFaceTokenizer(tokenizer_json)
    assert tokenizer.decode(tokenizer.encode("a long enough text")) == "a long enough text"
    assert [len(tokens) for tokens in tokenizer.encode_batch(["é", ""])] == [2, 0]


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b"\xff\xfe", b'{"version": "1.0", "model": {}}'])
def test_malformed_file(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match="not a tokenizer file") as caught:
        build_tokenizer("HuggingFaceTokenizer", str(path))
    assert caught.value.problems[0].code == "tokenizer-malformed"


def test_missing_file_package_and_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer_json: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        HuggingFaceTokenizer(tmp_path / "none.json")
    with pytest.raises(DataError, match="needs a file"):
        build_tokenizer("HuggingFaceTokenizer", None)
    with pytest.raises(DataError, match="unknown tokenizer type 'Other'"):
        build_tokenizer("Other", None)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install 'graphstep\[hf\]'"):
        HuggingFaceTokenizer(tokenizer_json)
    assert isinstance(build_tokenizer("ByteTokenizer", None), ByteTokenizer)
