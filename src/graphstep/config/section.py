"""What the sections of a configuration have in common."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from graphstep.config.validation import settle


class Section:
    """Base of the frozen dataclasses whose fields carry the names of their options.

    Raises:
        ConfigError: values of the wrong type, out of range or that contradict each other; all problems at once.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        settle(self)

    def options(self) -> Mapping[str, Any]:
        """Return the values under the names of their options, as the rules know them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
