from __future__ import annotations

import random
from pathlib import Path

import pytest

from graphstep.training.data import HuggingFaceTokenizer


@pytest.fixture(scope="session")
def tokenizer_content() -> str:
    """A byte-level tokenizer.json with an end-of-document token and random merges."""
    tokenizers = pytest.importorskip("tokenizers")
    rng = random.Random(0)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|endoftext|>": 0, **{letter: index for index, letter in enumerate(alphabet, 1)}}
    merges: list[tuple[str, str]] = []
    plain = [letter for letter in alphabet if letter.isascii() and letter.isalpha()]
    while len(merges) < 60:
        pair = (rng.choice(plain), rng.choice(plain))
        if "".join(pair) not in vocabulary:
            merges.append(pair)
            vocabulary["".join(pair)] = len(vocabulary)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    return str(tokenizer.to_str())


@pytest.fixture
def tokenizer_json(tokenizer_content: str, tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer" / "tokenizer.json"
    path.parent.mkdir()
    path.write_text(tokenizer_content)
    return path


@pytest.fixture(scope="session")
def huggingface_tokenizer(tokenizer_content: str, tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(tokenizer_content)
    return HuggingFaceTokenizer(path)
