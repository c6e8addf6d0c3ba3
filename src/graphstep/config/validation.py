"""Check and complete options. The one validator behind the command line and the dataclasses.

Values travel under the names of their options (``hidden_size``, ``cuda_graph_impl``), in one flat mapping.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import Any, TypeVar

from graphstep.errors import ConfigError, Problem

E = TypeVar("E", bound=Enum)


def options_of(section: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name."""
    return {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}


def derive_into(section: Any) -> None:
    """Fill in the fields of a frozen dataclass that are worked out from the others."""
    for name, value in derived(options_of(section)).items():
        object.__setattr__(section, name, value)


def derived(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that are worked out, for those options that are 0 and whose sources are given."""
    found: dict[str, Any] = {}
    for name, (sources, work_out) in DERIVED.items():
        if options.get(name) == 0 and all(source in options for source in sources):
            found[name] = work_out(*(options[source] for source in sources))
    return found


def _ffn_hidden_size(hidden_size: int, swiglu: bool) -> int:
    return max(64, 8 * hidden_size // 3 // 64 * 64) if swiglu else 4 * hidden_size


DERIVED: Mapping[str, tuple[tuple[str, ...], Callable[..., int]]] = {
    "num_query_groups": (("num_attention_heads",), lambda heads: heads),
    "kv_channels": (("hidden_size", "num_attention_heads"), lambda hidden, heads: hidden // max(1, heads)),
    "ffn_hidden_size": (("hidden_size", "swiglu"), _ffn_hidden_size),
    "max_position_embeddings": (("seq_length",), lambda seq: seq),
    "global_batch_size": (("micro_batch_size",), lambda micro: micro),
    "lr_decay_iters": (("train_iters",), lambda iters: iters),
}
"""Option -> the options it is worked out from when it is 0, and how."""


def require(options: Mapping[str, Any], problems: Collection[Problem] = ()) -> None:
    """Raise all problems at once."""
    if problems:
        raise ConfigError(tuple(problems))


def coerce(kind: type[E], value: object, dest: str, problems: list[Problem]) -> E:
    """Return the member of ``kind`` with this value; adds a problem if there is none."""
    return kind(value)
