"""What is wrong with numbers that an order is made from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphstep.errors import ConfigError, Problem


def size_problems(sizes: Mapping[str, int], at_least: int = 1) -> list[Problem]:
    """A problem for each of these named sizes that is no whole number, or a smaller one."""
    return [
        Problem(
            code="pipeline-size",
            what=f"{name} is a whole number of at least {at_least}, got {size!r}",
            where=f"argument {name}",
            fix=f"use {at_least} or more",
        )
        for name, size in sizes.items()
        if not is_whole(size) or size < at_least
    ]


def is_whole(number: object) -> bool:
    """True for an int; a bool is one for Python, and none here."""
    return isinstance(number, int) and not isinstance(number, bool)


def is_size(size: int) -> bool:
    """True for a whole number of at least 1."""
    return is_whole(size) and size >= 1


def raise_if_any(problems: Sequence[Problem]) -> None:
    """Refuse to go on where there are problems.

    Raises:
        ConfigError: with all of them.
    """
    if problems:
        raise ConfigError(problems)
