"""Options of the model."""

from __future__ import annotations

from graphstep.config.choices import NORMALIZATIONS, POSITION_EMBEDDINGS
from graphstep.config.model import ModelConfig
from graphstep.config.options.option import Option, OptionGroup, integer, number, positive

_model = OptionGroup("model", "model", ModelConfig)

MODEL_OPTIONS: tuple[Option, ...] = (
    _model.option("--num-layers", "transformer layers", type=integer, metavar="N"),
    _model.option("--hidden-size", "width of the residual stream", type=integer, metavar="CHANNELS"),
    _model.option(
        "--ffn-hidden-size",
        "width inside the MLP",
        type=positive,
        metavar="CHANNELS",
        default_text="4 x hidden size; with --swiglu 8/3 of it, down to a multiple of 64",
    ),
    _model.option("--num-attention-heads", "query heads of an attention", type=integer, metavar="N"),
    _model.option(
        "--kv-channels",
        "channels of one head",
        type=positive,
        metavar="CHANNELS",
        default_text="hidden size / heads",
    ),
    _model.switch("--group-query-attention", "share keys and values among heads; needs --num-query-groups"),
    _model.option(
        "--num-query-groups",
        "key and value heads with --group-query-attention",
        type=positive,
        metavar="N",
        default_text="one a head",
    ),
    _model.option("--seq-length", "tokens of a training sequence", type=integer, metavar="TOKENS"),
    _model.option(
        "--max-position-embeddings",
        "positions the model can be given",
        type=positive,
        metavar="TOKENS",
        default_text="--seq-length",
    ),
    _model.option(
        "--vocab-size",
        "vocabulary before padding",
        type=positive,
        metavar="TOKENS",
        default_text="that of the tokenizer",
    ),
    _model.switch("--swiglu", "MLP with a SiLU-gated linear unit instead of GELU"),
    _model.option("--normalization", "normalisation of the layers", choices=NORMALIZATIONS),
    _model.option("--norm-epsilon", "added to the variance in a normalisation", type=number, metavar="X"),
    _model.option(
        "--position-embedding-type",
        "learned table, rotation of queries and keys, or none",
        choices=POSITION_EMBEDDINGS,
    ),
    _model.option("--rotary-base", "base of the rotation frequencies", type=number, metavar="X"),
    _model.option("--rotary-percent", "share of a head's channels that is rotated", type=number, metavar="SHARE"),
    _model.option("--attention-dropout", "dropout of the attention probabilities", type=number, metavar="P"),
    _model.option(
        "--hidden-dropout",
        "dropout of the embedding and of what a layer adds to the residual stream",
        type=number,
        metavar="P",
    ),
    _model.switch("", "linear layers without bias", off="--disable-bias-linear", dest="add_bias_linear"),
    _model.switch("--add-qkv-bias", "a bias in the query-key-value projection even with --disable-bias-linear"),
    _model.switch("--qk-layernorm", "normalise the queries and keys of each head"),
    _model.switch("--untie-embeddings-and-output-weights", "output weights of their own, not those of the embedding"),
    _model.option("--init-method-std", "standard deviation of the initial weights", type=number, metavar="X"),
)
