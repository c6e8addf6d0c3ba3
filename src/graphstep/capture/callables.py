"""What a callable argument holds: where it may collect something that a replay would not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from graphstep.errors import CaptureError


@dataclass(slots=True)
class Held:
    """What lies directly in a callable, each with a path."""

    values: list[tuple[str, Any]] = field(default_factory=list)
    dicts: list[tuple[str, dict[Any, Any]]] = field(default_factory=list)
    cells: list[tuple[str, Any, str, Any]] = field(default_factory=list)
    """Variables of a closure: where they are kept, and under which attribute."""


def held_by(path: str, function: Any) -> Held:
    """The object of a method, the variables of a closure, the arguments of a ``partial``, attributes of an object."""
    if isinstance(function, partial):
        found = held_by(path, function.func)
        found.values += [(f"{path}.args[{index}]", each) for index, each in enumerate(function.args)]
        found.dicts.append((path, function.keywords))
        return found
    owner = getattr(function, "__self__", None)
    if owner is not None:
        return Held([(path, owner)])
    found = Held()
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    for name, cell in zip(getattr(code, "co_freevars", ()), cells, strict=False):
        try:
            value = cell.cell_contents
        except ValueError:  # Not assigned yet.
            continue
        found.cells.append((f"{path}.{name}", cell, "cell_contents", value))
        found.values.append((f"{path}.{name}", value))
    if code is None and isinstance(getattr(function, "__dict__", None), dict):
        found.dicts.append((path, function.__dict__))
    return found


def refuse_collected(paths: Sequence[str], where: str) -> None:
    """Refuse a region that changes these.

    Raises:
        CaptureError: there is one.
    """
    if paths:
        raise CaptureError(
            f"each run changes what a callable among its arguments holds: {', '.join(paths)}; a replay runs no Python "
            "and changes nothing there",
            where=where,
            fix="return what is collected from the captured module, and collect it outside",
        )
