"""The one validator, behind the command line and the dataclasses.

Values travel in a flat mapping, under the names of their options (``hidden_size``, ``cuda_graph_impl``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from numbers import Integral, Real
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar

from graphstep.config.derived import DERIVED, derived_options, underivable
from graphstep.config.rules import RULES
from graphstep.config.rules.rule import flag_of
from graphstep.config.suggest import suggestion
from graphstep.errors import ConfigError, Problem

E = TypeVar("E", bound=Enum)

LARGEST_INTEGER = 2**63 - 1
"""Whole numbers end up in 64-bit tensors and file formats."""


@dataclasses.dataclass(frozen=True, slots=True)
class Notice:
    """Something that a user should know and that is no error: an option without effect, a discouraged value."""

    code: str
    """Stable short name."""
    what: str
    """What has no effect, or is discouraged."""
    where: str = ""
    """The options."""
    fix: str = ""
    """The change to make."""

    def __str__(self) -> str:
        return f"{self.what} ({self.fix})" if self.fix else self.what


class Optioned(Protocol):
    """A part of the configuration."""

    def options(self) -> Mapping[str, Any]:
        """Return the values under the names of their options."""
        ...


def find_problems(
    options: Mapping[str, Any],
    *,
    skip: Collection[str] = (),
    derived: Collection[str] = (),
    for_training: bool = False,
) -> tuple[list[Problem], list[Notice]]:
    """Return the problems and the notices of the rules whose options are all known.

    Args:
        options: values by name.
        skip: names whose values are known to be wrong; rules that look at them are left out.
        derived: names whose values were worked out: they are as wrong as what they were worked out from.
        for_training: look at the rules of ``graphstep train`` as well.
    """
    problems: list[Problem] = []
    notices: list[Notice] = []
    wrong = set(skip)
    view = SimpleNamespace(**options)
    for rule in RULES:
        if rule.for_training and not for_training:
            continue
        wrong |= {name for name in derived if wrong.intersection(DERIVED[name][0])}
        if any(name not in options or name in wrong for name in rule.fields) or not rule.broken(view):
            continue
        problem = rule.problem({name: options[name] for name in rule.fields})
        if rule.is_notice:
            notices.append(Notice(problem.code, problem.what, problem.where, problem.fix))
        else:
            problems.append(problem)
        if rule.is_range:
            wrong.update(rule.fields)
    return problems, notices


def settle(section: Optioned, names: Mapping[str, str] | None = None) -> None:
    """Complete a frozen dataclass that was just built: convert numbers, work out what was left out, check the rules.

    Args:
        section: a dataclass; its fields are written.
        names: option names of those fields that are called otherwise.

    Raises:
        ConfigError: all problems at once.
    """
    problems: list[Problem] = []
    wrong: set[str] = set()
    for field in dataclasses.fields(section):  # type: ignore[arg-type]
        name = (names or {}).get(field.name, field.name)
        converted = convert_value(name, str(field.type), getattr(section, field.name))
        if isinstance(converted, Problem):
            problems.append(converted)
            wrong.add(name)
        else:
            object.__setattr__(section, field.name, converted)
    derived = derived_options(section.options(), wrong)
    for name, value in derived.items():
        object.__setattr__(section, name, value)
    options = section.options()
    problems += find_problems(options, skip=wrong | underivable(options, derived), derived=derived)[0]
    if problems:
        raise ConfigError(problems)


def convert_value(name: str, annotation: str, value: object) -> Any:
    """Return a value in the type that a field has, or the problem with it.

    Args:
        name: the option.
        annotation: type of its field, as the dataclass writes it; others than those of the table pass.
        value: what was given.
    """
    convert = _CONVERTERS.get(annotation)
    if convert is None:
        return value
    try:
        return convert(value)
    except (TypeError, ValueError) as error:
        code, fix = f"{name.replace('_', '-')}-type", f"give {flag_of(name)} such a value"
        return Problem(code, f"{name}: {error}", flag_of(name), fix)


def to_member(kind: type[E], value: object, name: str) -> E:
    """Return the member of an enum with this value.

    Raises:
        ConfigError: there is none.
    """
    try:
        return kind(value)
    except ValueError as error:
        words = [str(member.value) for member in kind]
        what = f"{name}: expected one of {', '.join(words)}, got {value!r}"
        raise ConfigError(
            Problem(
                f"{name.replace('_', '-')}-choice",
                what,
                flag_of(name),
                suggestion(str(value), words, "use one of these"),
            )
        ) from error


def module_words(value: object) -> tuple[str, ...]:
    """Return the names of modules as a tuple, as often as they are named; None means none, commas join several.

    Raises:
        ConfigError: neither a word nor a list of words.
    """
    words = as_words(() if value is None else value)
    parts = (part.strip() for word in words for part in str(word).split(","))
    return tuple(part for part in parts if part)


def as_words(value: object) -> tuple[str, ...]:
    """Return a word or several as a tuple.

    Raises:
        ConfigError: neither.
    """
    words = (value,) if isinstance(value, str) else value
    if not isinstance(words, list | tuple | set | frozenset) or not all(isinstance(word, str) for word in words):
        raise ConfigError(Problem("words-type", f"expected a list of words, got {value!r}", fix="give a list of words"))
    return tuple(words)


def whole_number(value: object) -> int:
    """Return ``value`` as an ``int`` of 64 bits."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"expected a whole number, got {value!r}")
    if abs(int(value)) > LARGEST_INTEGER:
        raise ValueError(f"expected a whole number of at most {LARGEST_INTEGER}")
    return int(value)


def real_number(value: object) -> float:
    """Return ``value`` as a finite ``float``."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"expected a number, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError("expected a finite number")
    return number


def _truth(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"expected True or False, got {value!r}")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r}")
    return value


def _or_none(convert: Callable[[object], Any]) -> Callable[[object], Any]:
    return lambda value: None if value is None else convert(value)


def _words(value: object) -> tuple[str, ...]:
    try:
        return as_words(value)
    except ConfigError as error:
        raise TypeError(error.problems[0].what) from error


_CONVERTERS: Mapping[str, Callable[[object], Any]] = {
    "int": whole_number,
    "int | None": _or_none(whole_number),
    "float": real_number,
    "float | None": _or_none(real_number),
    "bool": _truth,
    "str": _text,
    "str | None": _or_none(_text),
    "tuple[str, ...]": _words,
    "tuple[str, ...] | None": _or_none(_words),
}
"""Annotation of a field -> what makes sure that a value is of this type."""
