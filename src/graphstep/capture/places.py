"""Where Python keeps what code reads: variables, and attributes of objects that are no modules."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

GONE: Final = object()
"""Stands for what is not there."""


class Place(NamedTuple):
    """One variable, or one attribute of an object, that is no module's."""

    path: str
    owner: Any
    """A dict, or an object with an attribute."""
    key: str
    is_whole: bool
    """What lies in its value counts as well."""

    def value(self) -> Any:
        """What is there now."""
        return self.owner.get(self.key, GONE) if isinstance(self.owner, dict) else getattr(self.owner, self.key, GONE)
