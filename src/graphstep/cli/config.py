"""``graphstep config``: what a command line amounts to, without running it. Imports no torch."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from typing import Any

from graphstep.cli.problems import print_notices, printable, problem_lines
from graphstep.config import Notice, RunConfig, from_argv
from graphstep.config.captured import describe_capture
from graphstep.config.environment import VARIABLES, Environment
from graphstep.config.options import Option
from graphstep.errors import ConfigError, Problem

JSON_FLAG, ALL_FLAG, RULES_FLAG = "--json", "--all", "--rules"
FLAGS: Mapping[str, str] = {
    JSON_FLAG: "print one JSON object",
    ALL_FLAG: "show options of parts that the run does not use, too",
    RULES_FLAG: "print the page of rules, docs/rules.md, and nothing else",
}
"""Options of this command alone, and what they do."""
SHOWN_SECTIONS = ("model", "training", "data", "graphs")
"""Sections that are shown even when everything in them is at its default."""


def run(argv: Sequence[str]) -> int:
    """Print the effective configuration: a table, or with ``--json`` one JSON object.

    It also describes what ``graphstep train`` cannot do yet, such as a run on several ranks, and says that it cannot.

    Args:
        argv: options of ``graphstep train``, and those of ``FLAGS``.

    Returns:
        Exit code 0, also for options that ``graphstep train`` alone refuses.

    Raises:
        ConfigError: wrong options; all problems at once.
    """
    if RULES_FLAG in argv:
        from graphstep.config.rules_page import rules_page

        print(rules_page(), end="")
        return 0
    words = [word for word in argv if word not in FLAGS]
    config = _read(words)
    notices, refused = config.notices, tuple[Problem, ...]()
    try:
        notices = from_argv(words, os.environ, for_training=True).notices
    except ConfigError as error:
        refused = tuple(error.problems)
    if JSON_FLAG in argv:
        print(json.dumps(_as_json(config, notices, refused), indent=2))
        return 0
    _print_table(config, refused, is_full=ALL_FLAG in argv)
    print_notices(notices)
    return 0


def _read(words: Sequence[str]) -> RunConfig:
    try:
        return from_argv(words, os.environ)
    except ConfigError:
        from_argv(words, os.environ, for_training=True)  # Which has more to say of them, and says all at once.
        raise


def _as_json(config: RunConfig, notices: Sequence[Notice], refused: Sequence[Problem]) -> dict[str, Any]:
    origins = {option.dest: origin for option, _, origin in config.entries()}
    return {
        **config.to_json(),
        "environment": dict(_set_variables(config)),
        "origins": origins,
        "captured": list(describe_capture(config)),
        "notices": [asdict(notice) for notice in notices],
        "refused_by_train": [asdict(problem) for problem in refused],
        "argv": config.to_argv(),
    }


def _set_variables(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield the environment variables that say something else than the default."""
    found, usual = (config.environment or Environment()).options(), Environment().options()
    yield from ((VARIABLES[name], value) for name, value in found.items() if value != usual[name])


def _print_table(config: RunConfig, refused: Sequence[Problem], *, is_full: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("option", "value", "from"):
        table.add_column(heading, overflow="fold")
    group, num_hidden = "", 0
    for option, value, origin in config.entries():
        if origin == "default" and not is_full and option.section not in SHOWN_SECTIONS:
            num_hidden += 1
            continue
        if option.group != group:
            group = option.group
            table.add_section()
            table.add_row(Text(group, style="bold"))
        style = "dim" if origin == "default" else ""
        row = ("  " + option.spellings[0], _shown(option, value), origin)
        table.add_row(*(Text(cell, style=style) for cell in row))
    variables = list(_set_variables(config))
    if variables:
        table.add_section()
        table.add_row(Text("environment", style="bold"))
    for name, value in variables:
        table.add_row(Text("  " + name), Text(printable(str(value))), Text("environment"))
    console = Console()
    console.print(table)
    if num_hidden:
        console.print(Text(f"{num_hidden} options of other parts are at their defaults: {ALL_FLAG} shows them\n"))
    console.print(Text("captured", style="bold"))
    for line in describe_capture(config):
        console.print(Text(f"  {line}"), soft_wrap=True)
    console.print()
    if refused:
        console.print(Text("refused by graphstep train", style="bold"))
        for line in chain.from_iterable(map(problem_lines, refused)):
            console.print(Text(f"  {line}"), soft_wrap=True)
        return
    console.print(Text("graphstep train " + printable(shlex.join(config.to_argv()))), soft_wrap=True)


def _shown(option: Option, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value is bool(option.flags) else "no"
    if value == option.default and not value and option.default_text:
        return option.default_text
    if value is None:
        return "-"
    return printable(" ".join(str(word) for word in value) if isinstance(value, tuple) else str(value))
