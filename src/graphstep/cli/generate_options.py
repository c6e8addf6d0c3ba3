"""The options of ``graphstep generate``, read without torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from graphstep.cli.engine_options import (
    ENGINE_OPTIONS,
    MODEL_OPTION,
    RUN_OPTIONS,
    SEED_OPTION,
    EngineOptions,
    command_group,
    note_missing_model,
    read_engine,
)
from graphstep.config.options import Option
from graphstep.config.options.option import positive, text
from graphstep.config.parsing import read_options
from graphstep.errors import Problem
from graphstep.inference.requests import MAX_TEMPERATURE

_group = command_group("generation")
_OWN: Final[tuple[Option, ...]] = (
    MODEL_OPTION,
    _group.option(
        "--prompt",
        "what to continue, a prompt in quotes each; without this and a file: standard input, one a line",
        nargs="+",
        metavar="TEXT",
    ),
    _group.option("--prompt-file", "prompts, one a line; -: standard input", type=text, metavar="FILE"),
    _group.count("--max-new-tokens", "most tokens to generate for a prompt", "N", type=positive, default=128),
    _group.share("--temperature", "divides the logits; 0: always the most likely token", default=1.0),
    _group.count("--top-k", "draw from so many of the most likely tokens; 0: from all", "N", default=0),
    _group.share(
        "--top-p", "draw from the fewest most likely tokens that have this probability together", "P", default=1.0
    ),
    SEED_OPTION,
    _group.switch("--ignore-eos", "do not stop at the token that ends a text"),
    _group.switch("--json", "print one JSON object a prompt instead of text"),
    *ENGINE_OPTIONS,
)
GENERATE_OPTIONS: Final[tuple[Option, ...]] = (*_OWN, *RUN_OPTIONS)
"""All of them: its own, and those of runs that inference knows."""
_FIELDS: Final = ("prompt_file", "max_new_tokens", "temperature", "top_k", "top_p", "ignore_eos", "json")


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateOptions(EngineOptions):
    """What a command line says."""

    prompts: tuple[str, ...]
    prompt_file: str | None
    """Prompts, one a line; ``-``: standard input, as without this and prompts of the command line."""
    max_new_tokens: int
    temperature: float
    top_k: int
    top_p: float
    ignore_eos: bool
    json: bool


def read_generate_options(argv: Sequence[str], env: Mapping[str, str] = os.environ) -> GenerateOptions:
    """Read a command line.

    Raises:
        ConfigError: everything that is wrong, at once.
    """
    reading = read_options(argv, GENERATE_OPTIONS, help_hint="graphstep generate --help lists the options")
    own: dict[str, Any] = {option.dest: reading.values.pop(option.dest, option.default) for option in _OWN}
    note_missing_model(reading, own, code="generate-model", use="generate with")
    if own["prompt"] and own["prompt_file"] is not None:
        what = "prompts of the command line and of a file, of which one can be"
        reading.problems.append(Problem("generate-prompts", what, "--prompt, --prompt-file", "leave one out"))
    reading.problems += _problems_of_ranges(own)
    return GenerateOptions(
        prompts=tuple(own["prompt"] or ()),
        **{name: own[name] for name in _FIELDS},
        **read_engine(reading, own, env),
    )


def _problems_of_ranges(own: Mapping[str, Any]) -> list[Problem]:
    checks = (
        ("temperature", 0 <= own["temperature"] <= MAX_TEMPERATURE, f"0 to {MAX_TEMPERATURE:g}"),
        ("top_k", own["top_k"] >= 0, "0 or more"),
        ("top_p", 0 < own["top_p"] <= 1, "above 0 and at most 1"),
    )
    problems = []
    for name, holds, expected in checks:
        if not holds:
            option = f"--{name.replace('_', '-')}"
            what = f"{option} must be {expected}, got {own[name]}"
            problems.append(Problem(f"generate-{name.replace('_', '-')}", what, option, "change it, or leave it out"))
    return problems
