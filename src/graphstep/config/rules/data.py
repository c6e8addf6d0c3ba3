"""Rules about data and tokenizer."""

from __future__ import annotations

from graphstep.config.choices import BYTE_VOCABULARY, TOKENIZER_TYPES
from graphstep.config.rules.rule import Rule, at_least, in_range, no_effect, one_of
from graphstep.config.split import is_split, split_weights

DATA_RULES: tuple[Rule, ...] = (
    in_range("data_path", lambda v: v is None or len(v) > 0, "one path or more", "name a text file, or leave it out"),
    in_range(
        "split",
        is_split,
        "up to three weights with a positive first one",
        "give the weights of training, validation and test data, such as 969,30,1",
    ),
    one_of("tokenizer_type", TOKENIZER_TYPES),
    at_least(1, "make_vocab_size_divisible_by", "use 1 for no padding"),
    Rule(
        code="tokenizer-model-missing",
        fields=("tokenizer_type", "tokenizer_model"),
        broken=lambda o: o.tokenizer_type == "HuggingFaceTokenizer" and o.tokenizer_model is None,
        what="HuggingFaceTokenizer needs a tokenizer file",
        fix="add --tokenizer-model with the path of a tokenizer.json, or use --tokenizer-type ByteTokenizer",
    ),
    no_effect(
        "tokenizer-model-without-effect",
        ("tokenizer_type", "tokenizer_model"),
        lambda o: o.tokenizer_type == "ByteTokenizer" and o.tokenizer_model is not None,
        "--tokenizer-model has no effect: ByteTokenizer reads no file",
        "add --tokenizer-type HuggingFaceTokenizer, or leave it out",
    ),
    Rule(
        code="vocab-size",
        fields=("vocab_size", "tokenizer_type", "make_vocab_size_divisible_by"),
        blames=("vocab_size",),
        broken=lambda o: o.tokenizer_type == "ByteTokenizer" and 0 < o.vocab_size < BYTE_VOCABULARY,
        what=f"the tokenizer has {BYTE_VOCABULARY} tokens, and the model only {{vocab_size}}: --vocab-size rounded up "
        "to a multiple of {make_vocab_size_divisible_by}",
        fix="leave it out to take the vocabulary of the tokenizer",
        for_training=True,
    ),
    Rule(
        code="mock-and-real-data",
        fields=("mock_data", "data_path"),
        broken=lambda o: o.mock_data and o.data_path is not None,
        what="--mock-data makes up its tokens, but --data-path names data to read",
        fix="keep one of the two",
    ),
    Rule(
        code="validation-without-data",
        fields=("split", "eval_iters"),
        broken=lambda o: o.eval_iters > 0 and split_weights(o.split)[1] == 0,
        what="the split {split} leaves no data for validation",
        fix="give validation a weight, such as --split 969,30,1, or turn it off with --eval-iters 0",
    ),
)
