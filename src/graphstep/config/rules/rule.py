"""One rule, and short forms for the common kinds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What may not be, how it is said, and how it is put right.

    A rule applies wherever all of its options are known: those of one section are checked when that section is built,
    the others when a run is put together, and those with options that only a command line has, when one is read.
    """

    code: str
    """Stable short name."""
    fields: tuple[str, ...]
    """The options it looks at, by the names they have as attributes (``hidden_size``)."""
    broken: Callable[[Any], bool]
    """Given an object with these options as attributes: is the rule broken?"""
    what: str
    """Expected and found; ``{hidden_size}`` stands for the value."""
    fix: str = ""
    """The change to make."""
    is_notice: bool = False
    """The user is told, and the run goes on."""
    for_training: bool = False
    """Holds for ``graphstep train`` only: what it cannot do yet, or what has no effect there."""
    is_range: bool = False
    """About one value alone; a value that breaks it takes no part in the rules about several."""

    @property
    def where(self) -> str:
        """The options, as typed on a command line."""
        return ", ".join(flag_of(name) for name in self.fields if not is_fact(name))


def is_fact(name: str) -> bool:
    """Is this a name that rules can look at and that is no option?

    ``layer_modules``: the modules that the layers of the model have. ``given_...``: the option stands on the command
    line.
    """
    return name == "layer_modules" or name.startswith("given_")


def flag_of(name: str) -> str:
    """Return the option that sets an attribute: ``hidden_size`` -> ``--hidden-size``."""
    return "--disable-bias-linear" if name == "add_bias_linear" else "--" + name.replace("_", "-")


def in_range(name: str, test: Callable[[Any], bool], expected: str, fix: str) -> Rule:
    """Return the rule that a single value passes ``test``."""
    return Rule(
        code=f"{name.replace('_', '-')}-range",
        fields=(name,),
        broken=lambda options: not test(getattr(options, name)),
        what=f"{flag_of(name)} must be {expected}, got {{{name}}}",
        fix=fix,
        is_range=True,
    )


def at_least(minimum: int, name: str, fix: str) -> Rule:
    """Return the rule ``name >= minimum``."""
    return in_range(name, lambda value: bool(value >= minimum), f"at least {minimum}", fix)


def one_of(name: str, choices: Sequence[str]) -> Rule:
    """Return the rule that a value is one of a few. (A command line is refused earlier, with a suggestion.)"""
    return in_range(name, lambda value: value in choices, "one of " + ", ".join(choices), "use one of these")


def no_effect(code: str, fields: Sequence[str], broken: Callable[[Any], bool], what: str, fix: str) -> Rule:
    """Return a notice: an option that changes nothing."""
    return Rule(code=code, fields=tuple(fields), broken=broken, what=what, fix=fix, is_notice=True)
