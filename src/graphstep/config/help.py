"""The text of ``graphstep train --help``, drawn by argparse from the table of options."""

from __future__ import annotations

from collections.abc import Sequence

from graphstep.config.options import OPTIONS, Option
from graphstep.config.options.config_file import CONFIG_FILE


def help_text(program: str, description: str, options: Sequence[Option] = (CONFIG_FILE, *OPTIONS)) -> str:
    """Return the help of a command.

    Args:
        program: name of the command, as typed.
        description: what it does.
        options: the options it takes.
    """
    import argparse

    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} [options]",
        description=description,
        add_help=False,
        allow_abbrev=False,
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in options:
        if option.group not in groups:
            groups[option.group] = parser.add_argument_group(option.group)
        lines = _help_of(option).replace("%", "%%")
        if option.nargs == 0:
            groups[option.group].add_argument(*option.spellings, action="store_true", help=lines)
        else:
            nargs = None if option.nargs == 1 else option.nargs
            groups[option.group].add_argument(
                *option.spellings,
                nargs=nargs,
                choices=None if option.metavar else option.choices or None,
                metavar=option.metavar or None,
                help=lines,
            )
    return parser.format_help()


def _help_of(option: Option) -> str:
    if option.nargs == 0:
        is_on = option.default is True
        default = "on" if is_on else "off"
        if not option.flags:
            return option.help
        return f"{option.help} (default: {default})"
    if option.default_text:
        return f"{option.help} (default: {option.default_text})"
    return option.help if option.default is None else f"{option.help} (default: {option.default})"
