"""Errors of the package: what they say, what they derive from, and that they cross process boundaries."""

from __future__ import annotations

import pickle

import pytest

from graphstep import errors
from graphstep.errors import ConfigError, GraphstepError, Problem, UserInputError

PROBLEMS = (Problem("first", "a is 1", "--a", "use 2"), Problem("second", "b is missing"))
KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, GraphstepError)]


def made(kind: type[GraphstepError]) -> GraphstepError:
    if issubclass(kind, UserInputError):
        return kind(PROBLEMS)
    return kind("a is 1", where="step", fix="use 2")


@pytest.mark.parametrize("kind", KINDS)
def test_pickled_errors_say_the_same(kind: type[GraphstepError]) -> None:
    error = made(kind)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not GraphstepError])
def test_errors_are_of_the_usual_python_type(kind: type[GraphstepError]) -> None:
    assert issubclass(kind, (ValueError, RuntimeError, ArithmeticError))


def test_what_where_and_fix_are_said() -> None:
    assert str(GraphstepError("a is 1", where="step", fix="use 2")) == "a is 1\n  where: step\n  fix:   use 2"
    assert str(GraphstepError("a is 1")) == "a is 1"
    assert str(UserInputError(PROBLEMS)) == "a is 1\n  where: --a\n  fix:   use 2\nb is missing"
    assert UserInputError(PROBLEMS[0]).problems == PROBLEMS[:1]


def test_how_old_options_were_read_comes_before_the_problems_and_through_pickle() -> None:
    error = ConfigError(PROBLEMS, notices=["--b is the old name of --a"])
    assert str(error) == f"note: --b is the old name of --a\n{UserInputError(PROBLEMS)}"
    copy = pickle.loads(pickle.dumps(error))
    assert vars(copy) == vars(error)
    assert str(copy) == str(error)
    assert ConfigError(PROBLEMS).notices == ()
