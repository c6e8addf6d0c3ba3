"""Rules about the shape of the model."""

from __future__ import annotations

from typing import Any

from graphstep.config.choices import NORMALIZATIONS, POSITION_EMBEDDINGS
from graphstep.config.rules.rule import Rule, at_least, in_range, no_effect, one_of


def _rotary_channels(options: Any) -> int:
    return int(options.kv_channels * options.rotary_percent)


MODEL_RULES: tuple[Rule, ...] = (
    at_least(1, "num_layers", "use 4 for a small model"),
    at_least(1, "hidden_size", "use a multiple of --num-attention-heads, such as 128"),
    at_least(1, "num_attention_heads", "use a divisor of --hidden-size, such as 4"),
    at_least(1, "num_query_groups", "use a divisor of --num-attention-heads"),
    # 0 is left for rule heads-divide-hidden
    at_least(0, "kv_channels", "leave it out for hidden size / heads"),
    at_least(1, "ffn_hidden_size", "leave it out for 4 x hidden size"),
    at_least(1, "seq_length", "use 128 for a small model"),
    at_least(1, "max_position_embeddings", "leave it out for --seq-length"),
    at_least(0, "vocab_size", "leave it out to take the vocabulary of the tokenizer"),
    one_of("normalization", NORMALIZATIONS),
    one_of("position_embedding_type", POSITION_EMBEDDINGS),
    in_range("norm_epsilon", lambda v: v > 0, "above 0", "use 1e-5"),
    in_range("rotary_base", lambda v: v > 0, "above 0", "use 10000"),
    in_range("rotary_percent", lambda v: 0 < v <= 1, "in (0, 1]", "use 1.0 to rotate all channels of a head"),
    in_range("attention_dropout", lambda v: 0 <= v < 1, "in [0, 1)", "use 0.0 for no dropout"),
    in_range("hidden_dropout", lambda v: 0 <= v < 1, "in [0, 1)", "use 0.0 for no dropout"),
    in_range("init_method_std", lambda v: v > 0, "above 0", "use 0.02"),
    Rule(
        code="heads-divide-hidden",
        fields=("hidden_size", "num_attention_heads", "kv_channels"),
        broken=lambda o: o.kv_channels == 0,
        what="hidden size {hidden_size} is not divisible by {num_attention_heads} attention heads",
        fix="choose sizes that divide, or give the channels of a head with --kv-channels",
    ),
    Rule(
        code="groups-divide-heads",
        fields=("num_attention_heads", "num_query_groups"),
        broken=lambda o: o.num_attention_heads % o.num_query_groups != 0,
        what="{num_attention_heads} attention heads cannot share {num_query_groups} query groups evenly",
        fix="make --num-query-groups a divisor of --num-attention-heads",
    ),
    Rule(
        code="groups-missing",
        fields=("group_query_attention", "num_query_groups", "given_num_query_groups"),
        broken=lambda o: o.group_query_attention and not o.given_num_query_groups,
        what="--group-query-attention needs the number of groups",
        fix="add --num-query-groups with a divisor of --num-attention-heads",
    ),
    no_effect(
        "groups-without-effect",
        ("group_query_attention", "num_query_groups", "given_num_query_groups"),
        lambda o: o.given_num_query_groups and not o.group_query_attention,
        "--num-query-groups has no effect without --group-query-attention: every head has its own keys and values",
        "add --group-query-attention, or leave --num-query-groups out",
    ),
    Rule(
        code="sequence-exceeds-positions",
        fields=("seq_length", "max_position_embeddings"),
        broken=lambda o: o.seq_length > o.max_position_embeddings,
        what="sequence length {seq_length} exceeds the {max_position_embeddings} positions of the model",
        fix="raise --max-position-embeddings to {seq_length}, or lower --seq-length",
    ),
    Rule(
        code="rotary-channels",
        fields=("position_embedding_type", "kv_channels", "rotary_percent"),
        broken=lambda o: (
            o.position_embedding_type == "rope"
            and o.kv_channels > 0
            and (_rotary_channels(o) % 2 != 0 or _rotary_channels(o) < 2)
        ),
        what="rotary positions turn channels in pairs, and {rotary_percent} of {kv_channels} is no even number",
        fix="choose --kv-channels and --rotary-percent so that an even number of channels, 2 or more, is rotated",
    ),
    no_effect(
        "rotary-without-effect",
        ("position_embedding_type", "rotary_base", "rotary_percent"),
        lambda o: o.position_embedding_type != "rope" and (o.rotary_base, o.rotary_percent) != (10000.0, 1.0),
        "--rotary-base and --rotary-percent have no effect with {position_embedding_type} positions",
        "add --position-embedding-type rope, or leave them out",
    ),
    no_effect(
        "qkv-bias-without-effect",
        ("add_qkv_bias", "add_bias_linear"),
        lambda o: o.add_qkv_bias and o.add_bias_linear,
        "--add-qkv-bias has no effect: every linear layer has a bias",
        "add --disable-bias-linear to keep a bias there only, or leave --add-qkv-bias out",
    ),
)
