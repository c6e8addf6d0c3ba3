"""Where the tokens come from. Names and meaning are those of Megatron-LM's options."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from graphstep.config.choices import TokenizerType
from graphstep.config.derived import padded_vocab_size
from graphstep.config.split import split_weights
from graphstep.config.validation import as_words, settle


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Data set, split and tokenizer.

    Raises:
        ConfigError: values that contradict each other; all problems at once.
    """

    data_path: tuple[str, ...] | None = None
    """Text files, folders of text files, or prefixes of Megatron's indexed format (``PREFIX.bin``, ``PREFIX.idx``).
    None: the text of the Python standard library on this machine."""
    split: str = "969,30,1"
    """Weights of training, validation and test data, separated by commas."""
    tokenizer_type: TokenizerType = "ByteTokenizer"
    """One token a byte, or a ``tokenizer.json`` of Hugging Face."""
    tokenizer_model: str | None = None
    """Path of the ``tokenizer.json``."""
    data_cache_path: str | None = None
    """Folder for tokenised text. None: the user's cache folder."""
    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this."""
    mock_data: bool = False
    """Random tokens drawn from the seed; reads no file."""
    append_eod: bool = True
    """Put the end-of-document token behind each text file."""

    def __post_init__(self) -> None:
        if self.data_path is not None:
            object.__setattr__(self, "data_path", as_words(self.data_path))
        settle(self)

    @property
    def split_weights(self) -> tuple[float, float, float]:
        """Weights of training, validation and test data; they add up to 1."""
        return split_weights(self.split)

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Return ``vocab_size`` rounded up to a multiple of ``make_vocab_size_divisible_by``."""
        return padded_vocab_size(vocab_size, self.make_vocab_size_divisible_by)

    def options(self) -> Mapping[str, Any]:
        """Return the values under the names of their options, as the rules know them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
