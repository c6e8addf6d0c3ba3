"""Rules about Mamba layers."""

from __future__ import annotations

from typing import Any

from graphstep.config.layer_pattern import pattern_layers
from graphstep.config.rules.rule import Rule, at_least, idle, optional


def has_letter(options: Any, letter: str) -> bool:
    """Does the pattern of layers have this one?"""
    return options.hybrid_layer_pattern is not None and letter in pattern_layers(options.hybrid_layer_pattern)


def _num_heads(options: Any) -> int:
    given: int | None = options.mamba_num_heads
    return int(2 * options.hidden_size // options.mamba_head_dim) if given is None else given


def _groups_that_divide(heads: int, options: Any) -> int:
    """Return the most groups that are no more than asked for and divide the heads."""
    return next(groups for groups in range(min(options.mamba_num_groups, heads), 0, -1) if heads % groups == 0)


def _sizes_that_fit(options: Any) -> dict[str, str]:
    """Return the largest size of a head that fits, with another number of groups if the one that is there does not."""
    channels = 2 * options.hidden_size
    size = next(size for size in range(min(options.mamba_head_dim, channels), 0, -1) if channels % size == 0)
    groups = _groups_that_divide(channels // size, options)
    rest = f" --mamba-num-groups {groups}" if groups != options.mamba_num_groups else ""
    return {"sizes": f"--mamba-head-dim {size}{rest}"}


MAMBA_RULES: tuple[Rule, ...] = (
    at_least(1, "mamba_state_dim", "use 128"),
    at_least(1, "mamba_head_dim", "use 64"),
    at_least(1, "mamba_num_groups", "use 8"),
    optional("mamba_num_heads", lambda v: v >= 1, "at least 1", "leave it out for 2 * hidden size / head size"),
    Rule(
        code="mamba-head-dim-divides",
        fields=("mamba_head_dim", "mamba_num_heads", "mamba_num_groups", "hidden_size"),
        blames=("mamba_head_dim", "mamba_num_heads", "hidden_size"),
        broken=lambda o: o.mamba_num_heads is None and 2 * o.hidden_size % o.mamba_head_dim != 0,
        details=_sizes_that_fit,
        what="twice the hidden size {hidden_size} cannot be divided into Mamba heads of {mamba_head_dim} channels",
        fix="use such as {sizes}, or give --mamba-num-heads",
        fix_on_page="change --mamba-head-dim, or give --mamba-num-heads",
    ),
    Rule(
        code="mamba-groups-divide-heads",
        fields=("mamba_num_groups", "mamba_num_heads", "mamba_head_dim", "hidden_size"),
        # Where the size of a head does not fit there is no number of heads to divide.
        broken=lambda o: (
            _num_heads(o) % o.mamba_num_groups != 0
            and (o.mamba_num_heads is not None or 2 * o.hidden_size % o.mamba_head_dim == 0)
        ),
        details=lambda o: {"heads": str(_num_heads(o)), "groups": str(_groups_that_divide(_num_heads(o), o))},
        what="the {heads} Mamba heads (2 * {hidden_size} / {mamba_head_dim} unless --mamba-num-heads says) "
        "cannot be divided into {mamba_num_groups} groups",
        fix="use such as --mamba-num-groups {groups}",
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
