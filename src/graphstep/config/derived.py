"""Values that are worked out from others when they are left out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any


def derived_options(options: Mapping[str, Any], skip: Collection[str] = ()) -> dict[str, Any]:
    """Return the values of those options that are 0, by name, where the options they are worked out from are known.

    Args:
        options: values by name; 0 stands for one that was left out.
        skip: names that cannot be computed with.
    """
    found: dict[str, Any] = {}
    for name, (sources, work_out) in DERIVED.items():
        if name not in skip and options.get(name) == 0 and all(s in options and s not in skip for s in sources):
            found[name] = work_out(*(options[source] for source in sources))
    return found


def underivable(options: Mapping[str, Any], derived: Collection[str]) -> set[str]:
    """Return the options that were left out and could not be worked out, because their sources are wrong."""
    return {name for name in DERIVED if options.get(name) == 0 and name not in derived}


def layer_modules(options: Mapping[str, Any]) -> frozenset[str]:
    """Return the parts that the layers of the model have, by the names of ``--cuda-graph-modules``.

    Args:
        options: values by name; dense decoders are all there is so far, so none of them matters.
    """
    del options
    return frozenset({"attn", "mlp"})


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """Return ``vocab_size`` rounded up to a multiple."""
    return (vocab_size + multiple - 1) // multiple * multiple


def _kv_channels(hidden_size: int, num_attention_heads: int) -> int:
    """Return the channels of a head, or 0 where the heads do not divide the hidden size: a rule says so."""
    if num_attention_heads < 1 or hidden_size % num_attention_heads:
        return 0
    return hidden_size // num_attention_heads


def _ffn_hidden_size(hidden_size: int, swiglu: bool) -> int:
    """Return the width of the MLP. SwiGLU has three matrices: 2/3 of the width keeps the parameters (Shazeer 2020)."""
    return max(64, 8 * hidden_size // 3 // 64 * 64) if swiglu else 4 * hidden_size


def _same(value: int) -> int:
    return value


DERIVED: Mapping[str, tuple[tuple[str, ...], Callable[..., int]]] = {
    "num_query_groups": (("num_attention_heads",), _same),
    "kv_channels": (("hidden_size", "num_attention_heads"), _kv_channels),
    "ffn_hidden_size": (("hidden_size", "swiglu"), _ffn_hidden_size),
    "max_position_embeddings": (("seq_length",), _same),
    "global_batch_size": (("micro_batch_size",), _same),
    "lr_decay_iters": (("train_iters",), _same),
}
"""Option -> the options it is worked out from, and how."""
