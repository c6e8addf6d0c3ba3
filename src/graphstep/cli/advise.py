"""``graphstep advise``: which options fit a scenario, and why. Imports no torch."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from graphstep.cli.problems import say
from graphstep.config import from_argv
from graphstep.config.advice import Advice, Facts, Scenario, advise, model_options
from graphstep.config.suggest import suggestion
from graphstep.errors import ConfigError, Problem

_SWITCHES = ("--dynamic-shapes", "--drop-and-pad", "--json")
_NUMBERS = ("--pipeline", "--experts-parallel")
_OPTIONS = ("--scenario", *_NUMBERS, *_SWITCHES)
_QUESTIONS: Mapping[str, str] = {
    "dense": "train a model of attention and MLP",
    "moe": "train a model with experts",
    "hybrid": "train a model with Mamba layers",
    "inference": "generate text",
    "rl": "train on text that the model generates",
    "own-loop": "a training loop of your own",
}

HELP = """\
usage: graphstep advise [options]

Print the options that fit a scenario, with the reason for each: values of --cuda-graph-impl, --cuda-graph-modules,
--inference-cuda-graph-scope and what goes with them. Without --scenario, asks on a terminal.

options:
  --scenario dense|moe|hybrid|inference|rl|own-loop
                        what is to be captured
  --dynamic-shapes      sequences or batches change their size from step to step
  --pipeline N          pipeline stages (default: 1)
  --experts-parallel N  ranks that share the experts (default: 1)
  --drop-and-pad        each expert gets a fixed number of tokens
  --json                print one JSON object
"""


def run(argv: Sequence[str]) -> int:
    """Print advice.

    Args:
        argv: see ``HELP``.

    Returns:
        Exit code 0.

    Raises:
        ConfigError: bad options, or no scenario and no terminal to ask on.
    """
    given = _read(argv)
    is_json = bool(given.pop("json", False))
    facts = Facts(**given) if "scenario" in given else _ask(given)
    rows = advise(facts)
    if is_json:
        print(json.dumps(_as_json(facts, rows), indent=2))
    else:
        _print(facts, rows)
    return 0


def command_line(facts: Facts, rows: Sequence[Advice]) -> list[str]:
    """Return the recommended options behind those of a model that they fit."""
    return [word for text in (model_options(facts), *(row.options for row in rows)) for word in text.split()]


def _as_json(facts: Facts, rows: Sequence[Advice]) -> dict[str, Any]:
    return {
        "scenario": str(facts.scenario),
        "facts": {
            "dynamic_shapes": facts.dynamic_shapes,
            "pipeline": facts.pipeline,
            "experts_parallel": facts.experts_parallel,
            "drop_and_pad": facts.drop_and_pad,
        },
        "options": [{"argv": row.options.split(), "reason": row.reason} for row in rows if row.options],
        "remarks": [row.reason for row in rows if not row.options],
        "argv": command_line(facts, rows),
        "not_available_yet": _not_available(facts, rows),
    }


def _print(facts: Facts, rows: Sequence[Advice]) -> None:
    for row in rows:
        if row.options:
            print(row.options)
        print(textwrap.fill(row.reason, width=100, initial_indent="    ", subsequent_indent="    "))
    print()
    print("graphstep config " + shlex.join(command_line(facts, rows)))
    for what in _not_available(facts, rows):
        say(f"note: {what}")


def _not_available(facts: Facts, rows: Sequence[Advice]) -> list[str]:
    """Return what cannot be done yet: what ``graphstep train`` says, and a loop of reinforcement learning."""
    missing = ["a loop of reinforcement learning is not available yet"] if facts.scenario is Scenario.rl else []
    try:
        from_argv(command_line(facts, rows), {}, for_training=True)
    except ConfigError as error:
        missing += [problem.what for problem in error.problems if problem.code.startswith("not-available")]
    return missing


def _read(argv: Sequence[str]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    problems: list[Problem] = []
    words = list(argv)
    while words:
        option, equals, value = words.pop(0).partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if option in _SWITCHES and not equals:
            given[name] = True
        elif option == "--scenario" or option in _NUMBERS:
            text = value if equals else (words.pop(0) if words else "")
            problem = _value(option, text, given)
            problems += [problem] if problem else []
        else:
            fix = suggestion(option, _OPTIONS, "graphstep advise --help lists the options")
            problems.append(Problem("unknown-option", f"there is no option {option}", option, fix))
    if problems:
        raise ConfigError(problems)
    return given


def _value(option: str, text: str, given: dict[str, Any]) -> Problem | None:
    if option == "--scenario":
        if text in list(Scenario):
            given["scenario"] = Scenario(text)
            return None
        what = f"{option}: expected one of {', '.join(Scenario)}, got {text!r}"
        return Problem("unknown-choice", what, option, suggestion(text, Scenario, "use one of these"))
    if text.isascii() and text.isdigit() and int(text[:7]) > 0 and len(text) < 7:
        given[option.removeprefix("--").replace("-", "_")] = int(text)
        return None
    what = f"{option}: expected a whole number above 0, got {text!r}"
    return Problem("malformed-value", what, option, f"write {option} 2")


def _ask(given: dict[str, Any]) -> Facts:
    if not all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stderr)):
        what = "there is no scenario, and no terminal to ask on"
        fix = f"add --scenario with one of {', '.join(Scenario)}"
        raise ConfigError(Problem("advise-scenario", what, "--scenario", fix))
    names = list(_QUESTIONS)
    for number, name in enumerate(names, 1):
        say(f"  {number}  {name:<10} {_QUESTIONS[name]}")
    while "scenario" not in given:
        answer = _answer("What do you want to capture? [1] ") or "1"
        name = names[int(answer) - 1] if answer in map(str, range(1, len(names) + 1)) else answer
        if problem := _value("--scenario", name, given):
            say(problem.what)
    if "dynamic_shapes" not in given:
        answer = _answer("Do sequences or batches change their size from step to step? [y/N] ")
        given["dynamic_shapes"] = answer.lower().startswith("y")
    asked = ("--pipeline", "How many pipeline stages? [1] "), ("--experts-parallel", "Ranks sharing experts? [1] ")
    for option, question in asked:
        needs = given["scenario"] in (Scenario.moe, Scenario.inference, Scenario.rl) or option == "--pipeline"
        while needs and option.removeprefix("--").replace("-", "_") not in given:
            if problem := _value(option, _answer(question) or "1", given):
                say(problem.what)
    return Facts(**given)


def _answer(question: str) -> str:
    say(question, end="")
    line = sys.stdin.readline()
    if not line:
        raise ConfigError(Problem("advise-scenario", "the input ended before the answer", "", "add --scenario"))
    return line.strip()
