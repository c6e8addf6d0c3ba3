"""Read keyword arguments by the table of options."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from graphstep.config.layer_freq import LAYER_FREQ, as_layer_freq
from graphstep.config.migrations import FULL, OLD_MODULES
from graphstep.config.options import OPTIONS, Option
from graphstep.config.parsing import Reading
from graphstep.config.suggest import suggestion
from graphstep.config.switches import CudaGraphModule
from graphstep.config.validation import convert_value, module_words
from graphstep.config.words import word_of
from graphstep.errors import ConfigError, Problem

ALIASES: Mapping[str, str] = {
    "num_moe_experts": "num_experts",
    "fp8": "fp8_format",
    "fp4": "fp4_format",
    "gtp_weight_remat_size": "tensor_parallel_num_weight_shards",
    "use_te_rng_tracker": "te_rng_tracker",
}
"""Name in Megatron-LM's transformer configuration -> name of the option."""

_MODULES = ("cuda_graph_modules", "cuda_graph_scope")


def read_keywords(given: Mapping[str, Any]) -> Reading:
    """Read values by name.

    Args:
        given: values; None counts as left out, except for an old name of modules.

    Returns:
        Values and problems; never raises for what a user can give.
    """
    table = {option.dest: option for option in OPTIONS}
    reading = Reading()
    for key, value in given.items():
        name = ALIASES.get(str(key), str(key))
        option = table.get(name)
        if name == "cpu_offloading":
            _read_offloading(value, given, reading)
        elif option is None:
            what, fix = f"there is no option {name}", suggestion(name, table, "see docs/rules.md")
            reading.problems.append(Problem("unknown-option", what, name, fix))
        elif name in reading.values and reading.values[name] != value:
            what = f"{key} and {name} are the same option, with different values"
            reading.problems.append(Problem("given-twice", what, name, "leave one of the two out"))
        elif value is not None and not _is_default(name, value, given):
            _read_value(option, value, reading)
    if "num_query_groups" in reading.values:
        # On a command line the number counts only with a switch; here it says enough.
        reading.values.setdefault("group_query_attention", True)
    return reading


def _is_default(name: str, value: object, given: Mapping[str, Any]) -> bool:
    """Is this the default of a field of Megatron-LM's, which does not count beside the old name of the field?"""
    return name == "cuda_graph_modules" and value == FULL and given.get("cuda_graph_scope") is not None


def _read_value(option: Option, value: object, reading: Reading) -> None:
    converted = _modules(option.dest, value) if option.dest in _MODULES else _plain(option, value)
    if isinstance(converted, Problem):
        reading.problems.append(converted)
        reading.wrong.add(option.dest)
    elif not (option.dest in ("enable_cuda_graph", "external_cuda_graph") and converted is False):
        reading.values[option.dest] = converted


def _plain(option: Option, value: object) -> Any:
    if isinstance(value, Enum) and not isinstance(value, str):
        value = value.name
    if option.annotation == LAYER_FREQ:
        return _freq(value)
    if option.dest == "data_path" and isinstance(value, list | tuple):
        parts = [word_of(item) for item in value]  # weights are numbers: [0.3, a, 0.7, b]
        value = value if None in parts else parts
    converted = convert_value(option.dest, option.annotation, value)
    if isinstance(converted, Problem) or not option.choices or option.nargs == "+":
        return converted
    if str(converted) in option.choices:
        return converted
    words = ", ".join(option.choices)
    return Problem(
        f"{option.dest.replace('_', '-')}-choice",
        f"{option.dest}: expected one of {words}, got {value!r}",
        option.spellings[0],
        suggestion(str(value), option.choices, "use one of these"),
    )


def _freq(value: object) -> Any:
    try:
        return as_layer_freq(value)
    except ConfigError as error:
        return error.problems[0]


def _modules(name: str, value: object) -> Any:
    """Return module words. Members of Megatron-LM's old enum have the old name only."""
    if name == "cuda_graph_scope":
        value = [_word(item) for item in value] if isinstance(value, list | tuple) else _word(value)
    flag = "--" + name.replace("_", "-")
    try:
        words = module_words(value)
    except ConfigError as error:
        return Problem("words-type", f"{name}: {error.problems[0].what}", flag, error.problems[0].fix)
    known = (*CudaGraphModule, *OLD_MODULES)
    for word in words:
        if word not in known:
            what = f"{name}: expected some of {', '.join(CudaGraphModule)}, got {word!r}"
            return Problem(f"{name.replace('_', '-')}-choice", what, flag, suggestion(word, known, "use some of these"))
    return words


def _word(item: object) -> object:
    return item.name if isinstance(item, Enum) and not isinstance(item, str) else item


def _read_offloading(value: object, given: Mapping[str, Any], reading: Reading) -> None:
    """Check Megatron-LM's switch against the number of layers, which says the same."""
    layers = given.get("cpu_offloading_num_layers") or 0
    if not isinstance(value, bool) or not isinstance(layers, int) or value is not (layers > 0):
        what = f"cpu_offloading={value!r} and cpu_offloading_num_layers={layers!r} contradict each other"
        fix = "give cpu_offloading_num_layers, and leave cpu_offloading out"
        reading.problems.append(Problem("cpu-offloading-contradiction", what, "--cpu-offloading-num-layers", fix))
