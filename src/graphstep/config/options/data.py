"""Options of data and tokenizer."""

from __future__ import annotations

from graphstep.config.choices import TOKENIZER_TYPES
from graphstep.config.data import DataConfig
from graphstep.config.options.option import Option, OptionGroup, integer, text

_data = OptionGroup("data", "data", DataConfig)

DATA_OPTIONS: tuple[Option, ...] = (
    _data.option(
        "--data-path",
        "text files, folders of text files, or prefixes of Megatron's .bin and .idx",
        nargs="+",
        type=text,
        metavar="PATH",
        default_text="the text of the Python standard library on this machine",
    ),
    _data.option("--split", "weights of training, validation and test data", type=text, metavar="T,V,T"),
    _data.option(
        "--tokenizer-type",
        "one token a byte, or a tokenizer.json (needs the extra hf)",
        choices=TOKENIZER_TYPES,
    ),
    _data.option("--tokenizer-model", "path of the tokenizer.json", type=text, metavar="FILE"),
    _data.option(
        "--data-cache-path",
        "folder for tokenised text",
        type=text,
        metavar="FOLDER",
        default_text="the user's cache folder",
    ),
    _data.option(
        "--make-vocab-size-divisible-by",
        "pad the vocabulary to a multiple of this",
        type=integer,
        metavar="N",
    ),
    _data.switch("--mock-data", "random tokens instead of data"),
    _data.switch(
        "--append-eod",
        "put the end-of-document token behind each text file",
        off="--no-append-eod",
    ),
)
