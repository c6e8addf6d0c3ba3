"""``graphstep config``: what a command line amounts to, without running it. Imports no torch."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from graphstep.cli.problems import print_notices
from graphstep.config import RunConfig, from_argv
from graphstep.config.options import Option

JSON_FLAG = "--json"


def run(argv: Sequence[str]) -> int:
    """Print the effective configuration: a table, or with ``--json`` one JSON object.

    Args:
        argv: options of ``graphstep train``, and ``--json``.

    Returns:
        Exit code 0.

    Raises:
        ConfigError: wrong options; all problems at once.
    """
    config = from_argv([word for word in argv if word != JSON_FLAG])
    if JSON_FLAG in argv:
        print(json.dumps(_as_json(config), indent=2))
        return 0
    _print_table(config)
    print_notices(config.notices)
    return 0


def _as_json(config: RunConfig) -> dict[str, Any]:
    origins = {option.dest: origin for option, _, origin in config.entries()}
    return {
        **config.to_json(),
        "origins": origins,
        "notices": [asdict(notice) for notice in config.notices],
        "argv": config.to_argv(),
    }


def _print_table(config: RunConfig) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("option", "value", "from"):
        table.add_column(heading, overflow="fold")
    group = ""
    for option, value, origin in config.entries():
        if option.group != group:
            group = option.group
            table.add_section()
            table.add_row(Text(group, style="bold"))
        style = "dim" if origin == "default" else ""
        row = ("  " + option.spellings[0], _shown(option, value), origin)
        table.add_row(*(Text(cell, style=style) for cell in row))
    console = Console()
    console.print(table)
    console.print(Text("graphstep train " + printable(shlex.join(config.to_argv()))), soft_wrap=True)


def _shown(option: Option, value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value is bool(option.flags) else "no"
    if value == option.default and not value and option.default_text:
        return option.default_text
    if value is None:
        return "-"
    return printable(" ".join(str(word) for word in value) if isinstance(value, tuple) else str(value))


def printable(text: str) -> str:
    """Return ``text`` with the bytes of file names that are no UTF-8 spelled out, so that any terminal takes it."""
    return text.encode("utf-8", "backslashreplace").decode()
