"""What a forward of transformers collects by hooks on inner modules, such as the logits of routers.

The hooks append to lists that belong to the call of the model. A replay runs no hooks, so a captured part collects into
lists of its own, returns what is in them, and whoever called it hands that on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

COLLECTED: Final = "graphstep_collected"
"""Name of the argument that tells a captured part what is collected."""


@dataclass(slots=True)
class Collected:
    """A result, and what was collected on the way."""

    result: Any
    found: dict[str, list[Any]]


def collected_names() -> tuple[str, ...]:
    """What the call of the model that is under way collects."""
    active = _active()
    lists = active.get() if active is not None else None
    return tuple(name for name in lists if not name.startswith("_")) if lists else ()


def hand_on(found: Mapping[str, Sequence[Any]]) -> None:
    """Give what a captured part has collected to the call of the model."""
    active = _active()
    lists = active.get() if active is not None else None
    for name, values in found.items():
        if lists is not None and name in lists:
            lists[name].extend(values)


@contextmanager
def collecting(names: Sequence[str]) -> Iterator[dict[str, list[Any]]]:
    """Collect under these names into lists of our own, and nothing into those of the call of the model."""
    found: dict[str, list[Any]] = {name: [] for name in names}
    active = _active()
    if active is None:
        yield found
        return
    token = active.set(found)
    try:
        yield found
    finally:
        active.reset(token)


def _active() -> Any:
    """Where transformers keeps the lists; ``None`` while it is not loaded, or where it has no such place."""
    module = sys.modules.get("transformers.utils.output_capturing")
    return getattr(module, "_active_collector", None)
