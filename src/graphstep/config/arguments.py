"""From a command line, a file or keyword arguments to a configuration.

All ways in lead through :func:`configure`, with what was given as flat values (see ``migrations.py`` for their shape).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphstep.config.derived import (
    complete_modules,
    default_global_batch_size,
    derived_options,
    implied_options,
    model_facts,
    padded_vocab_size,
    rank_facts,
    underivable,
)
from graphstep.config.environment import Environment, Machine, machine_facts, read_environment
from graphstep.config.keywords import read_keywords
from graphstep.config.layer_pattern import is_layer_pattern
from graphstep.config.migrations import OLD_NAMES, migrate
from graphstep.config.options import OPTIONS
from graphstep.config.options.config_file import CONFIG_FILE
from graphstep.config.parsing import Reading, read_options
from graphstep.config.run import SECTIONS, RunConfig
from graphstep.config.switches import default_inference_scope
from graphstep.config.validation import Notice, find_problems
from graphstep.errors import ConfigError

_SWITCHES = ("cuda_graph_impl", "cuda_graph_modules", "inference_cuda_graph_scope")


def from_argv(
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    machine: Machine | None = None,
    for_training: bool = False,
) -> RunConfig:
    """Return the configuration that a command line asks for. Old options are migrated, with one notice each.

    Args:
        argv: words, without the names of program and command; numbers and paths count as words. ``--config FILE`` names
            a file with further options.
        env: environment variables that rules look at; those of this process if None, as they are now.
        machine: what the configuration is for; nothing is known if None.
        for_training: refuse what ``graphstep train`` cannot do yet.

    Raises:
        ConfigError: unknown options, values that cannot be read, broken rules; all of them at once.
    """
    reading = read_options(argv, (CONFIG_FILE, *OPTIONS))
    reading.wrong.discard(CONFIG_FILE.dest)
    path = reading.values.pop(CONFIG_FILE.dest, None)
    env = os.environ if env is None else env
    if path is None:
        return configure(reading, env=env, machine=machine, for_training=for_training)
    from graphstep.config.files import configure_with_file

    return configure_with_file(path, reading, env=env, machine=machine, for_training=for_training)


def from_options(
    options: Mapping[str, Any] | None = None,
    /,
    *,
    env: Mapping[str, str] | None = None,
    machine: Machine | None = None,
    **more: Any,
) -> RunConfig:
    """Return the configuration that keyword arguments ask for, for a training loop of the caller's own.

    Names are those of the options (``cuda_graph_impl``), or of Megatron-LM's transformer configuration where that has
    another one (``num_moe_experts``). Old names and values are migrated, with one notice each. The loop is the
    caller's, so that nothing looks for NaN unless ``check_for_nan_in_loss_and_grad=True`` says that the loop does.

    Args:
        options: values by name.
        env: environment variables that rules look at; None: rules about the environment are left out.
        machine: what the configuration is for; nothing is known if None.
        more: more values by name.

    Raises:
        ConfigError: unknown names, values of the wrong type, broken rules; all of them at once.
    """
    reading = read_keywords({"check_for_nan_in_loss_and_grad": False, **(options or {}), **more})
    return configure(reading, env=env, machine=machine)


def configure(
    reading: Reading,
    *,
    env: Mapping[str, str] | None,
    origins: Mapping[str, str] | None = None,
    machine: Machine | None = None,
    for_training: bool = False,
) -> RunConfig:
    """Return the configuration for what was given, after migrating, completing and checking it.

    Args:
        reading: what was given, and what could not be read.
        env: environment variables; None: rules about the environment are left out.
        origins: where given values came from, by name, for those that are no ``option``.
        machine: what the configuration is for.
        for_training: refuse what ``graphstep train`` cannot do yet.

    Raises:
        ConfigError: everything that is wrong, at once; with how old options were read.
    """
    draft = _Draft(reading=reading, origins=dict.fromkeys(reading.values, "option") | dict(origins or {}))
    environment = _look_around(draft, env)
    _migrate(draft)
    derived = _complete(draft, environment)
    facts = _facts(draft, environment, machine or Machine())
    problems, notices = find_problems(
        draft.values | facts, skip=draft.wrong, derived=derived, for_training=for_training
    )
    if reading.problems or problems:
        raise ConfigError((*reading.problems, *problems), notices=[str(notice) for notice in draft.migrations])
    return RunConfig(
        **{
            name: section(**{o.target: draft.values[o.dest] for o in OPTIONS if o.section == name})
            for name, section in SECTIONS.items()
        },
        environment=environment,
        notices=(*reading.notices, *draft.migrations, *notices),
        origins={name: origin for name, origin in draft.origins.items() if name in draft.values},
    )


@dataclass(kw_only=True, slots=True)
class _Draft:
    """A configuration on its way."""

    reading: Reading
    origins: dict[str, str]
    given: Mapping[str, Any] = field(default_factory=dict)
    """What was given, migrated."""
    migrations: list[Notice] = field(default_factory=list)
    """How old options were read."""
    values: dict[str, Any] = field(default_factory=dict)
    """All values by name."""
    wrong: set[str] = field(default_factory=set)
    """Names that rules cannot look at."""


def _look_around(draft: _Draft, env: Mapping[str, str] | None) -> Environment | None:
    if env is None:
        return None
    environment, problems = read_environment(env)
    draft.reading.problems += problems
    return environment


def _migrate(draft: _Draft) -> None:
    """Turn old options into new ones, and fill in the defaults of what was not given."""
    reading = draft.reading
    migrated = migrate(reading.values)
    reading.problems += migrated.problems
    draft.migrations = [Notice(row.code, row.notice, row.old.split()[0], row.fix) for row in migrated.applied]
    draft.wrong = set(reading.wrong)
    if migrated.problems:
        draft.wrong.update(_SWITCHES)
    old = set(OLD_NAMES.values())
    draft.given = {name: value for name, value in migrated.values.items() if name not in old}
    for name, value in draft.given.items():
        if reading.values.get(name) != value:
            draft.origins[name] = "migrated"
    for name in reading.values:
        if name not in draft.given:
            draft.origins.pop(name, None)
    if any(row.reads == ("cuda_graph_modules",) for row in migrated.applied):
        draft.origins["cuda_graph_modules"] = "migrated"
    draft.values = {option.dest: option.default for option in OPTIONS if option.dest not in old} | dict(draft.given)


def _complete(draft: _Draft, environment: Environment | None) -> Mapping[str, Any]:
    """Fill in what was left out; returns the values that were worked out one from another."""
    values, given, origins = draft.values, draft.given, draft.origins
    if draft.wrong.intersection(_SWITCHES):
        values |= {"cuda_graph_impl": "none", "cuda_graph_modules": ()}
    if not values["group_query_attention"]:
        values["num_query_groups"] = 0
        origins["num_query_groups"] = "derived"
    for name, value in implied_options(values).items():
        if name not in given and name not in draft.wrong:
            values[name] = value
            origins[name] = "derived"
    factor = values["moe_expert_capacity_factor"]
    if factor is not None and factor < 0:
        values["moe_expert_capacity_factor"] = None
    values["cuda_graph_modules"] = complete_modules(values["cuda_graph_impl"], values["cuda_graph_modules"])
    if values["inference_cuda_graph_scope"] is None or "inference_cuda_graph_scope" in draft.wrong:
        values["inference_cuda_graph_scope"] = default_inference_scope(values["cuda_graph_impl"])
        origins["inference_cuda_graph_scope"] = "derived"
    if environment is not None and values["global_batch_size"] == 0 and environment.world_size > 1:
        values["global_batch_size"] = default_global_batch_size(values, environment.world_size)
        origins["global_batch_size"] = "environment"
    derived = derived_options(values, draft.wrong)
    values |= derived
    origins |= dict.fromkeys(derived, "derived")
    draft.wrong |= underivable(values, derived)
    fraction = values["lr_warmup_fraction"]
    if fraction is not None:
        origins["lr_warmup_iters"] = "derived"
        if 0 <= fraction < 1 and "lr_warmup_iters" not in given:
            values["lr_warmup_iters"] = int(fraction * values["lr_decay_iters"])
    multiple = values["make_vocab_size_divisible_by"]
    if multiple >= 1:
        values["vocab_size"] = padded_vocab_size(values["vocab_size"], multiple)
    return derived


def _facts(draft: _Draft, environment: Environment | None, machine: Machine) -> dict[str, Any]:
    """Return what rules look at and what is no option."""
    values = draft.values
    facts: dict[str, Any] = {f"given_{option.dest}": option.dest in draft.given for option in OPTIONS}
    named = set(draft.given.get("cuda_graph_modules", ()))
    facts["given_half_of_router"] = len(named.intersection({"moe_router", "moe_preprocess"})) == 1
    facts |= model_facts(values)
    pattern = values["hybrid_layer_pattern"]
    if pattern is not None and not is_layer_pattern(pattern):
        # What the layers that can be read have is known. What none of them has is not.
        draft.wrong |= {"layer_modules", "unmatched_modules"}
        if "num_layers" not in draft.given:
            draft.wrong.add("num_layers")
    asks = values["perform_rl_step"] or (values["fp8_recipe"] == "mxfp8" and values["fp8_format"] is not None)
    facts |= machine_facts(machine, look=bool(asks))
    if environment is not None:
        facts |= environment.options() | rank_facts(values, environment.world_size)
    return facts
