"""How errors are shown: once, on standard error, with what, where and how to fix it."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from graphstep.config import Notice
from graphstep.config.rules import RULES
from graphstep.errors import ConfigError, GraphstepError, Problem, UserInputError


def print_problems(problems: Sequence[Problem], stream: TextIO | None = None) -> None:
    """Print all problems of a user's input.

    Args:
        problems: one or more.
        stream: standard error if None.
    """
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"graphstep: {count}"]
    for problem in problems:
        lines += problem_lines(problem)
    say("\n".join(lines), stream)


def print_error(error: GraphstepError, stream: TextIO | None = None) -> None:
    """Print an error of this package.

    Args:
        error: one with problems is shown as :func:`print_problems` does, after how old options were read.
        stream: standard error if None.
    """
    if isinstance(error, UserInputError):
        if isinstance(error, ConfigError):
            print_notices(error.notices, stream)
        print_problems(error.problems, stream)
        if {problem.code for problem in error.problems} & {rule.code for rule in RULES}:
            say("graphstep config --rules explains the rules", stream)
        return
    kind = type(error).__name__
    say("\n".join(["graphstep: failed", *problem_lines(Problem(kind, error.what, error.where, error.fix))]), stream)


def print_os_error(error: OSError, stream: TextIO | None = None) -> None:
    """Print what the system refused while a command ran, such as the output to a full disk.

    Args:
        error: an error that no part of the program could say more about.
        stream: standard error if None.
    """
    where = "" if error.filename is None else printable(str(error.filename))
    fix = (
        "free space on the disk of the output and logs" if error.errno == errno.ENOSPC else "check path and permissions"
    )
    problem = Problem(
        "system", f"the system refused: {error.strerror or error}", where or "output or log of the command", fix
    )
    say("\n".join(["graphstep: failed", *problem_lines(problem)]), stream)


def print_notices(notices: Sequence[Notice | str], stream: TextIO | None = None) -> None:
    """Print what a user should know and that is no error, one line each; of several ranks only the first one does.

    Args:
        notices: none or more.
        stream: standard error if None.
    """
    if os.environ.get("RANK", "").strip() not in ("", "0"):
        return
    for notice in notices:
        say(f"note: {notice}", stream)


def say(text: str, stream: TextIO | None = None, *, end: str = "\n") -> None:
    """Print a message where messages go. One that nobody can read changes nothing, and no exit code.

    Args:
        text: what to print.
        stream: standard error if None, which may be closed or on a full disk.
        end: what to put behind it.
    """
    if stream is not None:
        print(text, file=stream, end=end)
    elif sys.stderr is not None:  # None: the shell closed it
        try:
            print(text, file=sys.stderr, end=end, flush=True)
        except OSError:
            # What standard error still holds would fail once more when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def printable(text: str) -> str:
    """Return ``text`` with the bytes of file names that are no UTF-8 spelled out, so that any terminal takes it."""
    return text.encode("utf-8", "backslashreplace").decode()


def problem_lines(problem: Problem) -> Iterator[str]:
    """Yield what is printed of one problem: what and code, where, fix."""
    yield f"- {problem.what} [{problem.code}]"
    if problem.where:
        yield f"  where: {problem.where}"
    if problem.fix:
        yield f"  fix:   {problem.fix}"
