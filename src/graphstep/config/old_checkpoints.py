"""The switches in the arguments that a Megatron-LM checkpoint carries, and their new form. Imports no torch.

Checkpoints hold members of enums by number. The old enum has numbers of its own, so that the new one cannot take its
place: 2 is ``attn`` there and ``mlp`` here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphstep.config.migrations import NEW_NAMES, OLD_NAMES, migrate
from graphstep.config.validation import Notice
from graphstep.errors import ConfigError, Problem

ENUMS_MODULE = "megatron.core.transformer.enums"
"""Where Megatron-LM's enums are pickled from."""


class OldCudaGraphScope(enum.Enum):
    """Megatron-LM's ``CudaGraphScope``: parts of a layer, and two words that now belong to other options."""

    full_iteration = 1
    attn = 2
    mlp = 3
    moe = 4
    moe_router = 5
    moe_preprocess = 6
    mamba = 7
    full_iteration_inference = 8


class PickledCudaGraphModule(enum.Enum):
    """Megatron-LM's ``CudaGraphModule``."""

    attn = 1
    mlp = 2
    moe = 3
    moe_router = 4
    moe_preprocess = 5
    mamba = 6


class PickledInferenceCudaGraphScope(enum.Enum):
    """Megatron-LM's ``InferenceCudaGraphScope``."""

    none = 1
    layer = 2
    block = 3


STAND_INS: Mapping[str, type[enum.Enum]] = {
    f"{ENUMS_MODULE}.CudaGraphScope": OldCudaGraphScope,
    f"{ENUMS_MODULE}.CudaGraphModule": PickledCudaGraphModule,
    f"{ENUMS_MODULE}.InferenceCudaGraphScope": PickledInferenceCudaGraphScope,
}
"""Name in a checkpoint -> the enum that takes its place when it is loaded."""

_LISTS = frozenset({"cuda_graph_scope", "cuda_graph_modules"})


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSwitches:
    """What the arguments in a checkpoint say about CUDA graphs."""

    options: Mapping[str, Any]
    """Values by option name, in the new form: for ``from_options``, or a file."""
    notices: tuple[Notice, ...]
    """What was migrated."""


def switches_of(arguments: Mapping[str, Any], source: str) -> CheckpointSwitches:
    """Return the switches in the arguments of a checkpoint, in the new form.

    Args:
        arguments: values by attribute name; words may be members of the enums of ``STAND_INS``. Others are left out.
        source: name of the checkpoint, for messages.

    Raises:
        ConfigError: values that are no words, or old and new forms that contradict each other; all at once.
    """
    given: dict[str, Any] = {}
    problems: list[Problem] = []
    for name in (*OLD_NAMES.values(), *NEW_NAMES.values()):
        value = arguments.get(name)
        if value is None or value is False or (name in _LISTS and not value):
            continue
        words = [_word(item) for item in _items(name, value)]
        if None in words:
            what = f"{name}: expected words, got {value!r}"
            fix = f"give {name} on the command line instead"
            problems.append(Problem("checkpoint-switch", what, source, fix))
        else:
            given[name] = tuple(words) if name in _LISTS else words[0]
    if given.keys() >= _LISTS and set(given["cuda_graph_scope"]) == set(given["cuda_graph_modules"]):
        del given["cuda_graph_scope"]  # Megatron-LM wrote both names
    outcome = migrate(given)
    problems += [Problem(p.code, p.what, f"{source}: {p.where}", p.fix) for p in outcome.problems]
    if problems:
        raise ConfigError(problems)
    notices = tuple(Notice(row.code, f"{source}: {row.notice}", row.old, row.fix) for row in outcome.applied)
    return CheckpointSwitches(options=outcome.values, notices=notices)


def _items(name: str, value: Any) -> list[Any]:
    if name not in _LISTS:
        return [value]
    if isinstance(value, str):
        return [word.strip() for word in value.split(",") if word.strip()]
    return list(value) if isinstance(value, list | tuple | set | frozenset) else [value]


def _word(item: Any) -> Any:
    """Return a word, or a switch; None for something else."""
    if isinstance(item, enum.Enum):
        return item.name
    return item if isinstance(item, str | bool) else None
