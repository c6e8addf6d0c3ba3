"""Rules about Mamba layers."""

from __future__ import annotations

from typing import Any

from graphstep.config.derived import pattern_layers
from graphstep.config.rules.rule import Rule, at_least, idle, optional


def has_letter(options: Any, letter: str) -> bool:
    """Does the pattern of layers have this one?"""
    return options.hybrid_layer_pattern is not None and letter in pattern_layers(options.hybrid_layer_pattern)


def _num_heads(options: Any) -> int:
    given: int | None = options.mamba_num_heads
    return int(2 * options.hidden_size // options.mamba_head_dim) if given is None else given


MAMBA_RULES: tuple[Rule, ...] = (
    at_least(1, "mamba_state_dim", "use 128"),
    at_least(1, "mamba_head_dim", "use 64"),
    at_least(1, "mamba_num_groups", "use 8"),
    optional("mamba_num_heads", lambda v: v >= 1, "at least 1", "leave it out for 2 * hidden size / head size"),
    Rule(
        code="mamba-head-dim-divides",
        fields=("mamba_head_dim", "mamba_num_heads", "hidden_size"),
        broken=lambda o: o.mamba_num_heads is None and 2 * o.hidden_size % o.mamba_head_dim != 0,
        what="twice the hidden size {hidden_size} cannot be divided into Mamba heads of {mamba_head_dim} channels",
        fix="change --mamba-head-dim, or give --mamba-num-heads",
    ),
    Rule(
        code="mamba-groups-divide-heads",
        fields=("mamba_num_groups", "mamba_num_heads", "mamba_head_dim", "hidden_size"),
        broken=lambda o: _num_heads(o) % o.mamba_num_groups != 0 or _num_heads(o) == 0,
        what="the Mamba heads (2 * {hidden_size} / {mamba_head_dim} unless --mamba-num-heads says) "
        "cannot be divided into {mamba_num_groups} groups",
        fix="change --mamba-num-groups",
    ),
)
"""What the layer itself insists on."""

MAMBA_SIZE_RULES: tuple[Rule, ...] = (
    *(rule for rule in MAMBA_RULES if rule.is_range),
    *idle(
        ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads"),
        ("hybrid_layer_pattern",),
        lambda o: not has_letter(o, "M"),
        "there are no Mamba layers",
        "add --hybrid-layer-pattern with an M, or leave it out",
    ),
)
"""Those of all configurations: Megatron-LM accepts sizes that do not fit each other."""
