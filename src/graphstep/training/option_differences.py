"""Which options make two models differ: what a user can write, instead of all tensors and sizes that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from graphstep.config.derived import DERIVED
from graphstep.config.options import OPTIONS, Option
from graphstep.errors import Problem

_OPTIONS: Final[Mapping[str, Option]] = {option.dest: option for option in OPTIONS}
_PRECISIONS: Final = frozenset({torch.float32, torch.bfloat16})
_KINDS: Final = ("hybrid_layer_pattern", "num_experts")
"""What says which kinds of layers a model has; absent from the architecture of one without."""
_NOTHING = "nothing was loaded"
_AS_WRITTEN = f"as in the run that wrote it; {_NOTHING}"
_LATER: Final[Mapping[str, Any]] = {"qk_layernorm": False}
"""Options that checkpoints hold only where they are on, so that older ones fit."""


def option_problems(here: Mapping[str, Any], saved: Mapping[str, Any], *, where: str) -> list[Problem]:
    """Return one problem per option that has another value in the checkpoint.

    A value that both runs have worked out from options that differ is left out: it follows from them.

    Args:
        here: architecture of this run, by name.
        saved: architecture in the checkpoint, as its file holds it.
        where: the file.
    """
    here, saved = {**_LATER, **here}, {**_LATER, **saved}
    names = [name for name in dict.fromkeys((*here, *saved)) if here.get(name) != saved.get(name)]
    # Of layers that only one of the two models has, what says so is enough.
    names = [name for name in names if name in _KINDS or not _is_of_missing_layers(name, names, here, saved)]
    named = [name for name in names if not _is_explained(name, names, here, saved)]
    return [_problem(name, named, here, saved, where) for name in named]


def precision_problem(here: set[torch.dtype], saved: set[torch.dtype], *, where: str) -> Problem | None:
    """Return what is wrong if one run trains bf16 parameters and the other one fp32 parameters.

    Args:
        here: types of the parameters of this run.
        saved: types of those in the checkpoint.
        where: the file.
    """
    if here == saved or not len(here) == len(saved) == 1 or here | saved != _PRECISIONS:
        return None
    is_on = torch.bfloat16 in here
    what = f"--bf16 is {_on(is_on)} here and {_on(not is_on)} in the checkpoint"
    fix = f"{'leave --bf16 out' if is_on else 'add --bf16'}, {_AS_WRITTEN}"
    return Problem("checkpoint-mismatch", what, where=where, fix=fix)


def _is_of_missing_layers(name: str, names: list[str], here: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Tell whether an option is about layers that only one of the two models has."""
    is_missing = name not in here or name not in saved
    return is_missing and name in _OPTIONS and any(kind in names for kind in _KINDS)


def _problem(name: str, named: list[str], here: Mapping[str, Any], saved: Mapping[str, Any], where: str) -> Problem:
    code = "checkpoint-architecture"
    option = _OPTIONS.get(name)
    is_known = name in _KINDS or (name in here and name in saved)
    if option is None or not is_known:
        what = f"{name}: expected {here.get(name)!r}, found {saved.get(name)!r}"
        return Problem(code, what, where=where, fix=f"use the model options of the run that wrote it; {_NOTHING}")
    flag = option.spellings[0]
    if option.nargs == 0:
        # A switch that can only be turned off is named by the flag that does so.
        is_on, was_on = (value is bool(option.flags) for value in (here[name], saved[name]))
        what = f"{flag} is {_on(is_on)} here and {_on(was_on)} in the checkpoint"
    else:
        what = f"{flag} is {_shown(option, here)} here and {_shown(option, saved)} in the checkpoint"
    # What was worked out here would be worked out anew once this option is changed.
    others = [other for other, (sources, _) in DERIVED.items() if name in sources and other not in named]
    others = [other for other in others if other in saved and _worked_out(other, saved) not in (None, saved[other])]
    advice = " and ".join(_advice(_OPTIONS[each], saved) for each in (name, *others))
    return Problem(code, what, where=where, fix=f"{advice}, {_AS_WRITTEN}")


def _advice(option: Option, saved: Mapping[str, Any]) -> str:
    value, flag = saved.get(option.dest), option.spellings[0]
    if option.nargs == 0 or _is_left_out(option, saved):
        return f"add {flag}" if option.nargs == 0 and value is bool(option.flags) else f"leave {flag} out"
    if option.dest == "num_query_groups":
        if value == saved.get("num_attention_heads"):
            return "leave --group-query-attention out"
        return f"use --group-query-attention {flag} {value}"
    if option.dest == "vocab_size":
        return f"use its tokenizer, or {flag} {value}"
    if option.dest == "max_position_embeddings":
        return f"use {flag} {value} with a --seq-length of at most that"
    return f"use {flag} {value}"


def _is_left_out(option: Option, architecture: Mapping[str, Any]) -> bool:
    return option.default is None and architecture.get(option.dest) is None


def _shown(option: Option, architecture: Mapping[str, Any]) -> str:
    return "left out" if _is_left_out(option, architecture) else str(architecture[option.dest])


def _is_explained(name: str, names: list[str], here: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Tell whether both values follow from other options, of which one differs."""
    if name not in DERIVED or not set(DERIVED[name][0]).intersection(names):
        return False
    return all(_worked_out(name, options) == options.get(name) for options in (here, saved))


def _worked_out(name: str, options: Mapping[str, Any]) -> int | None:
    """Return what the option is when it is left out; None where that does not follow from ``options``."""
    sources, work_out = DERIVED[name]
    values = [options.get(source) for source in sources]
    return work_out(*values) if all(isinstance(value, int) for value in values) else None


def _on(is_on: bool) -> str:
    return "on" if is_on else "off"
