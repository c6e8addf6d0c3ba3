"""The options of ``graphstep plan``. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from graphstep.errors import ConfigError, Problem

BUDGET: Final = "--memory-budget"
SWITCHES: Mapping[str, str] = {
    "--measure": "capture what is recommended, train some steps, and show predicted against measured",
    "--measure-all": "the same with every choice that is possible",
    "--json": "print one JSON object",
}
"""Options of this command alone that take no value, and what they do."""
_UNITS: Mapping[str, int] = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_SIZE: Final = re.compile(r"(\d{1,30}(?:\.\d{1,30})?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)

TEXT: Final = (
    "Measure eager steps and say, before anything is captured, how much of a step is launches, and what each choice of "
    "--cuda-graph-impl and --cuda-graph-modules would gain and need. Takes the options of graphstep train; or, as the "
    "first word, file.py:function or module:function that takes no arguments and returns a step (a function) and its "
    f"model. Options of its own: {BUDGET} SIZE: memory that graphs may add to the peak of a step, such as 512MiB or "
    "2GiB (default: what is free on a GPU, no limit without); "
    + "; ".join(f"{flag}: {text}" for flag, text in SWITCHES.items())
    + "."
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What a command line asks for."""

    target: str | None = None
    """``module:function``; None: what the options of ``graphstep train`` describe."""
    train: tuple[str, ...] = field(default=())
    """These options."""
    budget_bytes: int | None = None
    measures: bool = False
    measures_all: bool = False
    is_json: bool = False


def read_plan_options(argv: Sequence[str]) -> PlanOptions:
    """Take apart the words of a command line.

    Raises:
        ConfigError: what is wrong with those of this command; the others are looked at later.
    """
    words, train, given = list(argv), list[str](), set[str]()
    target = words.pop(0) if words and not words[0].startswith("-") else None
    problems: list[Problem] = []
    budget: int | None = None
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name == BUDGET:
            text = value if equals else (words.pop(0) if words else "")
            budget = size_of(text)
            if budget is None:
                problems.append(
                    Problem("memory-budget", f"{text!r} is no size of memory", BUDGET, "write 512MiB or 2GiB")
                )
        elif word in SWITCHES:
            given.add(word)
        else:
            train.append(word)
    if target is not None and ":" not in target:
        problems.append(
            Problem("target-form", f"{target} names no function", "TARGET", "write file.py:function or module:function")
        )
    if target is not None and train:
        problems.append(
            Problem(
                "target-and-options",
                f"{' '.join(train)} are options of graphstep train, and {target} is planned for",
                "TARGET",
                "leave one of them out",
            )
        )
    if problems:
        raise ConfigError(problems)
    return PlanOptions(
        target=target,
        train=tuple(train),
        budget_bytes=budget,
        measures="--measure" in given,
        measures_all="--measure-all" in given,
        is_json="--json" in given,
    )


def size_of(text: str) -> int | None:
    """Bytes of ``512MiB``, ``2GiB`` or a plain number; None if it is no size."""
    found = _SIZE.fullmatch(text.strip())
    return None if found is None else int(float(found[1]) * _UNITS[found[2].lower()])
