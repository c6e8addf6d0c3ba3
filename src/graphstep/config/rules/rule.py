"""One rule, and short forms for the common kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from graphstep.config.choices import CHOICES
from graphstep.config.environment import VARIABLES
from graphstep.errors import Problem

RULES_PAGE = "docs/rules.md"


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
    details: Callable[[Any], Mapping[str, str]] | None = None
    """Given an object with those options alone, which break the rule: more names in braces for ``what`` and ``fix``."""
    fix_on_page: str = ""
    """The change as the page of rules has it, where ``fix`` depends on what was given."""
    blames: tuple[str, ...] = ()
    """The options to name, where they are fewer than those it looks at."""
    is_notice: bool = False
    """The user is told, and the run goes on."""
    for_training: bool = False
    """Holds for ``graphstep train`` only: what it cannot do yet, or what has no effect there."""
    is_range: bool = False
    """About one value alone; a value that breaks it takes no part in the rules about several."""

    def problem(self, options: Mapping[str, Any]) -> Problem:
        """Return what a user is told about this rule, which these options break.

        Args:
            options: the values it looks at, by name.
        """
        more = self.details(SimpleNamespace(**options)) if self.details is not None else {}
        named = {**options, **more}
        return Problem(self.code, self.what.format_map(named), self.where, self.fix.format_map(named))

    @property
    def where(self) -> str:
        """The options as typed on a command line, and the environment variables."""
        words = (VARIABLES.get(name) or flag_of(name) for name in self.blames or self.fields if not is_fact(name))
        return ", ".join(dict.fromkeys(words))

    @property
    def page(self) -> str:
        """The page that explains it."""
        return f"{RULES_PAGE}#{self.code}"


FACTS = frozenset(
    {
        "layer_modules",
        "dynamic_experts",
        "has_expert_layers",
        "parts_beside_experts",
        "unmatched_modules",
        "unknown_recompute_modules",
        "unknown_offload_modules",
        "ranks_of_a_replica",
        "data_parallel_size",
        "communicates_in_graphs",
        "te_version",
        "gpu_arch",
        "torch_memory_saver",
        "flashinfer_version",
    }
)
"""Names that rules can look at and that are neither options nor environment variables."""

_OFF_FLAGS: Mapping[str, str] = {
    "add_bias_linear": "--disable-bias-linear",
    "check_for_nan_in_loss_and_grad": "--no-check-for-nan-in-loss-and-grad",
    "fuse_gradient_accumulation": "--gradient-accumulation-fusion",
    "gradient_accumulation_fusion": "--no-gradient-accumulation-fusion",
}


def is_fact(name: str) -> bool:
    """Is this a name that rules can look at and that is nothing a user sets?

    ``given_...``: the option stands on the command line.
    """
    return name in FACTS or name.startswith("given_")


def flag_of(name: str) -> str:
    """Return the option that sets an attribute: ``hidden_size`` -> ``--hidden-size``."""
    return _OFF_FLAGS.get(name) or "--" + name.replace("_", "-")


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


def words_of(*names: str) -> tuple[Rule, ...]:
    """Return the rules that these options have one of their words, or none."""
    return tuple(
        in_range(
            name,
            lambda value, choices=CHOICES[name]: value is None or value in choices,  # type: ignore[misc]
            "one of " + ", ".join(CHOICES[name]),
            "use one of these",
        )
        for name in names
    )


def optional(name: str, test: Callable[[Any], bool], expected: str, fix: str) -> Rule:
    """Return the rule that a single value is None or passes ``test``."""
    return in_range(name, lambda value: value is None or test(value), expected, fix)


def idle(
    names: Sequence[str], needs: Sequence[str], is_idle: Callable[[Any], bool], reason: str, fix: str
) -> tuple[Rule, ...]:
    """Return a notice for each of these options that it changes nothing.

    Args:
        names: the options; the notice is given where one stands on the command line.
        needs: what ``is_idle`` looks at.
        is_idle: have they no effect?
        reason: why they have none.
        fix: the change to make.
    """
    return tuple(
        no_effect(
            f"{name.replace('_', '-')}-without-effect",
            (name, f"given_{name}", *(need for need in needs if need != name)),
            lambda options, given=f"given_{name}": bool(getattr(options, given)) and is_idle(options),  # type: ignore[misc]
            f"{flag_of(name)} has no effect: {reason}",
            fix,
        )
        for name in names
    )
