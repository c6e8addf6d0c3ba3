"""Every exception that graphstep raises on purpose.

Each one says *what* is wrong, *where*, and *how to fix it*; each also derives from the usual Python type, so that
``except ValueError`` keeps working, and can be pickled, so that it crosses process boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, in a form that a program can read."""

    code: str
    """Stable short name, such as ``data-missing``."""
    what: str
    """What was expected and what was found."""
    where: str = ""
    """The option, file, module path or argument at fault."""
    fix: str = ""
    """The change to make."""

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  where: {self.where}")
        if self.fix:
            lines.append(f"  fix:   {self.fix}")
        return "\n".join(lines)


class GraphstepError(Exception):
    """Base of all errors of this package.

    Args:
        what: expected and actual.
        where: module path, argument, option or file.
        fix: the change to make.
    """

    def __init__(self, what: str, *, where: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        return str(Problem(code="", what=self.what, where=self.where, fix=self.fix))

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.what, self.where, self.fix))


class UserInputError(GraphstepError, ValueError):
    """Bad input of a user: all problems at once. The CLI prints them and exits with code 2.

    Args:
        problems: at least one problem.
    """

    def __init__(self, problems: Sequence[Problem] | Problem) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __str__(self) -> str:
        return self.what

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.problems,))


class ConfigError(UserInputError):
    """Options that are unknown, malformed or contradict each other.

    Args:
        problems: at least one problem.
        notices: how old options were read, a line each: problems may name options that nobody typed.
    """

    def __init__(self, problems: Sequence[Problem] | Problem, *, notices: Sequence[str] = ()) -> None:
        super().__init__(problems)
        self.notices = tuple(notices)

    def __str__(self) -> str:
        return "\n".join([*(f"note: {notice}" for notice in self.notices), self.what])

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_config, (type(self), self.problems, self.notices))


class DataError(UserInputError):
    """Training data or a tokenizer that is missing, empty, truncated or does not fit the options."""


class CheckpointError(UserInputError):
    """A checkpoint that is missing, incomplete or belongs to another model."""


class RequestError(UserInputError):
    """A request for generation that is malformed or larger than what the engine can serve. It was not taken."""


class CaptureError(GraphstepError, RuntimeError):
    """A function cannot be captured. Nothing is left behind: memory, generators and state are as before the capture."""


class InputMismatchError(GraphstepError, ValueError):
    """Arguments that no recording can serve, all listed with their paths. Nothing was captured or replayed."""


class StaleAddressError(GraphstepError, RuntimeError):
    """A tensor that a recording reads or writes is no longer at its captured address. Nothing was replayed."""


class LifecycleError(GraphstepError, RuntimeError):
    """An object was used before it was ready or after it was closed. The object is unchanged."""


class PlanError(GraphstepError, RuntimeError):
    """Recordings were about to run in another order than planned. Nothing was replayed. For orders given by hand."""


class NonFiniteError(GraphstepError, ArithmeticError):
    """The loss or the gradient norm is NaN or infinite. The weights are those before the iteration it names."""


class VerificationError(GraphstepError, ArithmeticError):
    """A replay differs from eager execution, or nothing was replayed. All state is as before the verification."""


def _rebuild(kind: type[GraphstepError], what: str, where: str, fix: str) -> GraphstepError:
    return kind(what, where=where, fix=fix)


def _rebuild_config(kind: type[ConfigError], problems: tuple[Problem, ...], notices: tuple[str, ...]) -> ConfigError:
    return kind(problems, notices=notices)
