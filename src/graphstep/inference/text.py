"""Text to tokens and back, for prompts and for what is generated: by bytes, or by a ``tokenizer.json``."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

from graphstep.errors import DataError, Problem

_NUM_BYTES: Final = 256
_UNFINISHED: Final = "\N{REPLACEMENT CHARACTER}"
_MOST_IN_CHARACTER: Final = 4
"""Bytes of a character, and so the most tokens that it can consist of."""
_MOST_HELD: Final = 3 * _MOST_IN_CHARACTER
"""Tokens that may add nothing certain in a row."""


_FALLBACK: Final = re.compile("<0x[0-9A-F]{2}>")
"""How tokenizers that know few bytes write one."""


def _letters_of_bytes() -> Mapping[str, int]:
    """How tokenizers of bytes write each: as a letter of Latin-1 where there is one, else as the next one behind it."""
    visible = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, _NUM_BYTES))
    others = [byte for byte in range(_NUM_BYTES) if byte not in visible]
    letters = {chr(byte): byte for byte in visible} | {chr(_NUM_BYTES + n): byte for n, byte in enumerate(others)}
    return MappingProxyType(letters)


_BYTE_OF_LETTER: Final = _letters_of_bytes()


class TextStream(Protocol):
    """The text of tokens that come one by one. Joined, it is the text of all of them."""

    def add(self, token: int) -> str:
        """Give the text that is certain now: nothing while a character is incomplete."""

    def finish(self) -> str:
        """Give what is left, an incomplete character as U+FFFD."""


class TextTokens(Protocol):
    """What generation needs of a tokenizer."""

    @property
    def vocabulary(self) -> int:
        """One more than the highest token."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Tokens that end a text, as far as the tokenizer knows them."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a prompt, with those that the tokenizer puts in front of a text."""

    def bytes_of(self, token: int) -> bytes | None:
        """Bytes that a token adds to a text, which may be a part of a character; ``None``: not known."""

    def stream(self) -> TextStream:
        """Start a text."""


class ByteText:
    """The bytes of UTF-8, and one token that ends a text: the ``ByteTokenizer`` of training."""

    vocabulary = _NUM_BYTES + 1
    stop_tokens = (_NUM_BYTES,)

    def encode(self, text: str) -> list[int]:
        """See :class:`TextTokens`; no token is put in front. Bytes of a command line stay what they are."""
        try:
            return list(text.encode("utf-8", "surrogateescape"))
        except UnicodeEncodeError:  # half of a pair, which stands for no byte
            return list(text.encode("utf-8", "replace"))

    def bytes_of(self, token: int) -> bytes | None:
        """See :class:`TextTokens`."""
        return bytes([token]) if 0 <= token < _NUM_BYTES else b""

    def stream(self) -> TextStream:
        """See :class:`TextTokens`."""
        return _ByteStream()


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        return self._decoder.decode(bytes([token])) if 0 <= token < _NUM_BYTES else ""

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class HuggingFaceText:
    """A ``tokenizer.json``, read by the package ``tokenizers`` (extra ``hf``).

    Args:
        path: the file.
        stop_tokens: those that the model's folder names.
        adds_special_tokens: let the tokenizer put its tokens in front of prompts, as models of Hugging Face expect it.

    Raises:
        DataError: the package or the file is missing, or the file is malformed.
    """

    def __init__(self, path: Path, *, stop_tokens: tuple[int, ...] = (), adds_special_tokens: bool = True) -> None:
        self._backend = _load(path)
        self._adds_special_tokens = adds_special_tokens
        self.stop_tokens = stop_tokens
        self.vocabulary: int = max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """See :class:`TextTokens`. Bytes of a command line that are no text become U+FFFD."""
        text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        ids: list[int] = self._backend.encode(text, add_special_tokens=self._adds_special_tokens).ids
        return ids

    def bytes_of(self, token: int) -> bytes | None:
        """See :class:`TextTokens`."""
        # Behind itself, because some decoders drop the space of the first token.
        text = self._decode([token, token])[len(self._decode([token])) :]
        if _UNFINISHED not in text:
            return text.encode()
        letters = self._backend.id_to_token(token) or ""
        if _FALLBACK.fullmatch(letters):
            return bytes([int(letters[3:5], 16)])
        known = [_BYTE_OF_LETTER.get(letter) for letter in letters]
        found = [byte for byte in known if byte is not None]
        return bytes(found) if len(found) == len(known) else None

    def stream(self) -> TextStream:
        """See :class:`TextTokens`."""
        return _HuggingFaceStream(self._decode)

    def token(self, text: str) -> int | None:
        """The token with exactly this text, or ``None``."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def _decode(self, ids: list[int]) -> str:
        return str(self._backend.decode([i for i in ids if 0 <= i < self.vocabulary], skip_special_tokens=True))


class _HuggingFaceStream:
    """Decodes the tokens since the last text that came out with it: what spaces a token has depends on those before.

    Bytes that are no text, and tokens without one, are held for a while and then given up, so that no more than a few
    tokens are ever decoded, whatever a model says.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._num_shown = 0

    def add(self, token: int) -> str:
        self._tokens.append(token)
        before, after = self._decode(self._tokens[: self._num_shown]), self._decode(self._tokens)
        if len(after) > len(before) and not after.endswith(_UNFINISHED):
            self._show(len(self._tokens))
        elif len(self._tokens) - self._num_shown > _MOST_HELD:
            after = self._give_up(before, after)
        else:
            return ""
        return after[len(before) :]

    def finish(self) -> str:
        before, after = self._decode(self._tokens[: self._num_shown]), self._decode(self._tokens)
        return after[len(before) :]

    def _show(self, number: int) -> None:
        """The text of so many tokens has come out; those whose text had come out before are needed no longer."""
        self._tokens, self._num_shown = self._tokens[self._num_shown :], number - self._num_shown

    def _give_up(self, before: str, after: str) -> str:
        """Show what no further token can change: all but the bytes of a last character."""
        tokens, number = self._tokens, len(self._tokens)
        if after == before:  # Tokens of control; those with text stay, for the spaces of the next one.
            self._tokens = tokens[: self._num_shown] + tokens[-_MOST_IN_CHARACTER:]
            return after
        for begin in range(number - 1, number - 1 - _MOST_IN_CHARACTER, -1):
            first = self._decode(tokens[:begin])
            if len(first) >= len(before) and first + self._decode(tokens[begin:]) == after:
                self._show(begin)
                return first
        self._show(number)
        return after


def _load(path: Path) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        what = "a tokenizer.json needs the package 'tokenizers', which is not installed"
        fix = "pip install 'graphstep[hf]' (or: pip install 'tokenizers>=0.20')"
        raise DataError(Problem("tokenizers-not-installed", what, str(path), fix)) from error
    try:
        backend = tokenizers.Tokenizer.from_buffer(path.read_bytes())
    except OSError as error:
        what = f"the tokenizer file cannot be read: {error.strerror or error}"
        fix = "name an existing tokenizer.json with --tokenizer-model"
        raise DataError(Problem("tokenizer-missing", what, str(path), fix)) from error
    except Exception as error:  # the package raises plain Exception and ValueError for every fault of a file
        what = f"not a tokenizer file of Hugging Face: {error}"
        fix = "use the tokenizer.json of the model (not tokenizer_config.json, vocab.json or tokenizer.model)"
        raise DataError(Problem("tokenizer-malformed", what, str(path), fix)) from error
    # A file may ask for both; a prompt must be neither cut nor padded.
    backend.no_truncation()
    backend.no_padding()
    return backend
