"""Tokenizers: bytes without any file, or a ``tokenizer.json`` of Hugging Face.

A tokenizer turns whole documents into arrays of token ids. The end-of-document token (``eod``) is never made by
``encode``; whoever joins documents puts it between them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from graphstep.config.choices import BYTE_VOCABULARY
from graphstep.errors import DataError, Problem

IntArray = npt.NDArray[np.int64]

_EOD_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[EOS]", "<eod>")
"""Names under which published tokenizers keep their end-of-document token, most specific first."""


class Tokenizer(Protocol):
    """What the data side needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, the end-of-document token included; every id is below it."""

    @property
    def eod(self) -> int:
        """The id that separates documents."""

    @property
    def identity(self) -> str:
        """A string that differs whenever ``encode`` could differ; part of the name of a cache file."""

    def encode(self, text: str) -> IntArray:
        """Token ids of one text, without an end-of-document token."""

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        """Token ids of several texts, in order; may use several cores."""

    def decode(self, tokens: Sequence[int] | npt.NDArray[Any]) -> str:
        """Text of token ids; end-of-document tokens and ids of the padding of the vocabulary are left out."""


class ByteTokenizer:
    """The 256 bytes of UTF-8 and one end-of-document token: any text, no file, 257 ids."""

    vocab_size = BYTE_VOCABULARY
    eod = 256
    identity = "bytes-1"

    def encode(self, text: str) -> IntArray:
        """UTF-8 bytes of ``text``: int64 [number of bytes]."""
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        """UTF-8 bytes of each text: uint8 arrays, read-only."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int] | npt.NDArray[Any]) -> str:
        """Text of the ids below 256; bytes that are no UTF-8 (a model may emit them) become U+FFFD."""
        ids = np.asarray(tokens, dtype=np.int64)
        return ids[(ids >= 0) & (ids < 256)].astype(np.uint8).tobytes().decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` read by the package ``tokenizers`` (extra ``hf``).

    The end-of-document token is ``eod_token`` if given, else the first of the usual names that the vocabulary has
    (``<|endoftext|>``, ``</s>``, ...), else one new id after the vocabulary. Special tokens that the file would add
    around a text (such as a begin-of-text token) are not added.

    Args:
        path: the file, or the folder that holds ``tokenizer.json``.
        eod_token: text of the token that separates documents.

    Raises:
        DataError: the package, the file or the token is missing, or the file is malformed.
    """

    def __init__(self, path: str | Path, *, eod_token: str | None = None) -> None:
        self.path = Path(path)
        try:
            if self.path.is_dir():
                self.path = self.path / "tokenizer.json"
            content = self.path.read_bytes()
        except OSError as error:
            raise DataError(
                Problem(
                    code="tokenizer-missing",
                    what=f"the tokenizer file cannot be read: {error.strerror or error}",
                    where=f"--tokenizer-model {path}",
                    fix="name an existing tokenizer.json, or use --tokenizer-type ByteTokenizer, which needs no file",
                )
            ) from error
        self._backend = _load_backend(self.path, content)
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        size = max(vocabulary.values(), default=-1) + 1
        eod = _find_eod(vocabulary, eod_token, str(path))
        self.has_own_eod = eod is not None
        """False when the vocabulary had no end-of-document token and one id was added after it."""
        self._eod = size if eod is None else eod
        self._vocab_size = size + 1 if eod is None else size
        self._identity = f"huggingface-1:{hashlib.sha256(content).hexdigest()}:{self._eod}"

    @property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens and the end-of-document token included."""
        return self._vocab_size

    @property
    def eod(self) -> int:
        """The id that separates documents."""
        return self._eod

    @property
    def identity(self) -> str:
        """Hash of the file and the end-of-document token."""
        return self._identity

    def encode(self, text: str) -> IntArray:
        """Token ids of one text: int64 [number of tokens]."""
        return np.array(self._backend.encode(text, add_special_tokens=False).ids, dtype=np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[Any]]:
        """Token ids of each text: int64 arrays; runs on all cores."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]

    def decode(self, tokens: Sequence[int] | npt.NDArray[Any]) -> str:
        """Text of token ids, special tokens left out."""
        ids = np.asarray(tokens, dtype=np.int64)
        known = ids[(ids >= 0) & (ids < self._vocab_size) & (ids != self._eod)]
        return str(self._backend.decode(known.tolist(), skip_special_tokens=True))


def build_tokenizer(tokenizer_type: str, tokenizer_model: str | None) -> Tokenizer:
    """The tokenizer that ``--tokenizer-type`` and ``--tokenizer-model`` name.

    Raises:
        DataError: unknown type, ``HuggingFaceTokenizer`` without a model, or what the tokenizer itself finds.
    """
    if tokenizer_type == "ByteTokenizer":
        return ByteTokenizer()
    if tokenizer_type == "HuggingFaceTokenizer":
        if not tokenizer_model:
            raise DataError(
                Problem(
                    code="tokenizer-missing",
                    what="HuggingFaceTokenizer needs a file",
                    where="--tokenizer-model",
                    fix="add --tokenizer-model path/to/tokenizer.json, or use --tokenizer-type ByteTokenizer",
                )
            )
        return HuggingFaceTokenizer(tokenizer_model)
    raise DataError(
        Problem(
            code="tokenizer-unknown",
            what=f"unknown tokenizer type {tokenizer_type!r}",
            where="--tokenizer-type",
            fix="use ByteTokenizer or HuggingFaceTokenizer",
        )
    )


def _load_backend(path: Path, content: bytes) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise DataError(
            Problem(
                code="tokenizers-not-installed",
                what="HuggingFaceTokenizer needs the package 'tokenizers', which is not installed",
                where="--tokenizer-type HuggingFaceTokenizer",
                fix="pip install 'graphstep[hf]' (or: pip install 'tokenizers>=0.20')",
            )
        ) from error
    try:
        backend = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the package raises plain Exception and ValueError for every fault of a file
        raise DataError(
            Problem(
                code="tokenizer-malformed",
                what=f"not a tokenizer file of Hugging Face: {error}",
                where=f"--tokenizer-model {path}",
                fix="use the tokenizer.json of the model (not tokenizer_config.json, vocab.json or tokenizer.model)",
            )
        ) from error
    # A file may ask for both; a training text must be neither cut nor padded.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _find_eod(vocabulary: dict[str, int], eod_token: str | None, where: str) -> int | None:
    if eod_token is not None:
        if eod_token not in vocabulary:
            raise DataError(
                Problem(
                    code="tokenizer-eod",
                    what=f"the vocabulary has no token {eod_token!r}",
                    where=f"--tokenizer-model {where}",
                    fix="name a token of the vocabulary as the end-of-document token, or none",
                )
            )
        return vocabulary[eod_token]
    return next((vocabulary[name] for name in _EOD_NAMES if name in vocabulary), None)
