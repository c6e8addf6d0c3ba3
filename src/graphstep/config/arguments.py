"""From a command line to a configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphstep.config.data import DataConfig
from graphstep.config.derived import derived_options, layer_modules, padded_vocab_size, underivable
from graphstep.config.model import ModelConfig
from graphstep.config.options import OPTIONS
from graphstep.config.parsing import Reading, read_options
from graphstep.config.run import RunConfig
from graphstep.config.switches import CudaGraphConfig
from graphstep.config.training import TrainingConfig
from graphstep.config.validation import find_problems
from graphstep.errors import ConfigError

_SECTIONS: Mapping[str, type] = {
    "model": ModelConfig,
    "training": TrainingConfig,
    "data": DataConfig,
    "graphs": CudaGraphConfig,
}


def from_argv(argv: Sequence[str], env: Mapping[str, str] | None = None, *, for_training: bool = False) -> RunConfig:
    """Return the configuration that a command line asks for.

    Args:
        argv: words, without the names of program and command.
        env: environment variables that rules may look at; none does so far.
        for_training: refuse what ``graphstep train`` cannot do yet.

    Raises:
        ConfigError: unknown options, values that cannot be read, broken rules; all of them at once.
    """
    del env
    reading = read_options(argv)
    values = {option.dest: option.default for option in OPTIONS} | reading.values
    derived = _complete(values, reading)
    facts: dict[str, Any] = {f"given_{option.dest}": option.dest in reading.values for option in OPTIONS}
    facts["layer_modules"] = layer_modules(values)
    problems, notices = find_problems(values | facts, skip=reading.wrong, derived=derived, for_training=for_training)
    if reading.problems or problems:
        raise ConfigError((*reading.problems, *problems))
    origins = dict.fromkeys(derived, "derived") | dict.fromkeys(reading.values, "option")
    if not values["group_query_attention"]:
        origins["num_query_groups"] = "derived"
    if values["lr_warmup_fraction"] is not None:
        origins["lr_warmup_iters"] = "derived"
    origins.setdefault("inference_cuda_graph_scope", "derived")
    return RunConfig(
        **{
            name: section(**{o.target: values[o.dest] for o in OPTIONS if o.section == name})
            for name, section in _SECTIONS.items()
        },
        notices=(*reading.notices, *notices),
        origins=origins,
    )


def _complete(values: dict[str, Any], reading: Reading) -> Mapping[str, Any]:
    """Fill in what was left out; returns the values that were worked out."""
    if not values["group_query_attention"]:
        values["num_query_groups"] = 0
    derived = derived_options(values, reading.wrong)
    values |= derived
    reading.wrong |= underivable(values, derived)
    fraction = values["lr_warmup_fraction"]
    if fraction is not None and 0 <= fraction < 1 and "lr_warmup_iters" not in reading.values:
        values["lr_warmup_iters"] = int(fraction * values["lr_decay_iters"])
    multiple = values["make_vocab_size_divisible_by"]
    if multiple >= 1:
        values["vocab_size"] = padded_vocab_size(values["vocab_size"], multiple)
    return derived
