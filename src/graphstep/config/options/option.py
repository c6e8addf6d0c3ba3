"""One option of the command line, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from graphstep.config.choices import CHOICES
from graphstep.config.validation import LARGEST_INTEGER, real_number

Nargs = Literal[0, 1, "+"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """An option: how it is spelled, what it takes, where its value goes."""

    dest: str
    """Name of the value: Megatron-LM's attribute name."""
    flags: tuple[str, ...] = ()
    """Spellings, such as ``--num-layers``; for a switch, those that turn it on."""
    off_flags: tuple[str, ...] = ()
    """Spellings that turn a switch off."""
    nargs: Nargs = 1
    """Words it takes: 0 for a switch, ``"+"`` for a list of one or more."""
    type: Callable[[str], Any] = str
    """Turns one word into a value; raises ``ValueError`` with what was expected."""
    choices: tuple[str, ...] = ()
    """The words it takes, if there are only a few."""
    splits_commas: bool = False
    """A list whose words may also be joined by commas."""
    default: Any = None
    """Value when it is left out."""
    default_text: str = ""
    """What ``--help`` says about the default, where the value does not say it."""
    group: str = ""
    """Heading in ``--help``."""
    section: str | None = None
    """Field of ``RunConfig`` the value goes to; ``None``: it only takes part in working out another one."""
    field: str = ""
    """Field of that section, if not called ``dest``."""
    annotation: str = ""
    """Type of the value, as the dataclass of the section writes it."""
    metavar: str = ""
    """What stands for the value in ``--help``; its unit where it has one."""
    help: str = ""
    """What it does."""

    @property
    def target(self) -> str:
        """Field of the section."""
        return self.field or self.dest

    @property
    def spellings(self) -> tuple[str, ...]:
        """All spellings."""
        return self.flags + self.off_flags


class OptionGroup:
    """Makes the options of one section, with the defaults of its dataclass.

    Args:
        group: heading in ``--help``.
        section: field of ``RunConfig``.
        config: the dataclass.
        names: option names of those fields that are called otherwise.
    """

    def __init__(self, group: str, section: str, config: type, names: Mapping[str, str] | None = None) -> None:
        self.group = group
        self.section = section
        self._fields = {(names or {}).get(field.name, field.name): field for field in fields(config)}

    def option(self, flags: str, help_text: str, *, dest: str = "", **more: Any) -> Option:
        """Return an option that takes a value.

        Args:
            flags: spellings with spaces between them; the first one gives the name.
            help_text: what it does.
            dest: name, where it is another one.
            more: other fields of ``Option``.
        """
        spellings = tuple(flags.split())
        dest = dest or spellings[0].removeprefix("--").replace("-", "_")
        field = self._fields.get(dest)
        if field is not None:
            default = () if field.default is MISSING else field.default
            place = {"section": self.section, "field": field.name, "annotation": str(field.type)}
            more = {"default": default, **place} | more
        elif more.get("nargs") == 0:
            more |= {"default": False, "annotation": "bool"}
        return Option(dest=dest, flags=spellings, group=self.group, help=help_text, **more)

    def switch(self, flags: str, help_text: str, *, off: str = "", dest: str = "") -> Option:
        """Return an option without a value.

        Args:
            flags: spellings that turn it on; may be empty.
            help_text: what it does.
            off: spellings that turn it off.
            dest: name, where the first spelling does not give it.
        """
        off_flags = tuple(off.split())
        if flags:
            return self.option(flags, help_text, dest=dest, nargs=0, off_flags=off_flags)
        return Option(
            dest=dest,
            off_flags=off_flags,
            nargs=0,
            default=self._fields[dest].default,
            group=self.group,
            section=self.section,
            annotation="bool",
            help=help_text,
        )

    def word(self, flags: str, help_text: str, **more: Any) -> Option:
        """Return an option that takes one of the words of ``CHOICES``."""
        dest = flags.removeprefix("--").replace("-", "_")
        return self.option(flags, help_text, choices=CHOICES[dest], **more)

    def count(self, flags: str, help_text: str, metavar: str, **more: Any) -> Option:
        """Return an option that takes a whole number."""
        chosen: dict[str, Any] = {"type": integer, "metavar": metavar, **more}
        return self.option(flags, help_text, **chosen)

    def share(self, flags: str, help_text: str, metavar: str = "X", **more: Any) -> Option:
        """Return an option that takes a number."""
        chosen: dict[str, Any] = {"type": number, "metavar": metavar, **more}
        return self.option(flags, help_text, **chosen)


def integer(word: str) -> int:
    """Read a whole number."""
    try:
        number = int(word)
    except ValueError as error:
        raise ValueError("a whole number") from error
    if abs(number) > LARGEST_INTEGER:
        raise ValueError(f"a whole number of at most {LARGEST_INTEGER}")
    return number


def positive(word: str) -> int:
    """Read a whole number above 0: for options where 0 would mean that they are left out."""
    number = integer(word)
    if number < 1:
        raise ValueError("a whole number above 0")
    return number


def number(word: str) -> float:
    """Read a finite number."""
    try:
        return real_number(float(word))
    except ValueError as error:
        raise ValueError("a finite number") from error


def text(word: str) -> str:
    """Read a name or a path."""
    if not word.strip() or "\0" in word:
        raise ValueError("a name that is not empty")
    return word
