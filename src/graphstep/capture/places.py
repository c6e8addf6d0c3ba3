"""Where Python keeps what code reads: variables, and attributes of objects that are no modules."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from torch import Tensor

from graphstep.engine import torch_private

GONE: Final = object()
"""Stands for what is not there."""
PLAIN: Final = (bool, int, float, str)
"""What is compared by value."""


class Place(NamedTuple):
    """One variable, or one attribute of an object, that is no module's."""

    path: str
    owner: Any
    """A dict, or an object with an attribute."""
    key: str
    is_whole: bool
    """What lies in its value counts as well."""
    is_read: bool = True
    """False for a list or the like to which something is appended, and nothing else is done with it."""

    def value(self) -> Any:
        """What is there now."""
        return self.owner.get(self.key, GONE) if isinstance(self.owner, dict) else getattr(self.owner, self.key, GONE)


def storage_of(value: Any) -> int | None:
    """The key of the storage of a tensor; ``None`` for anything else."""
    if not isinstance(value, Tensor):
        return None
    try:
        return torch_private.storage_key(value)
    except (NotImplementedError, RuntimeError):  # Sparse: it has none.
        return None


def key_name(key: Any) -> str:
    """A key as a part of a path. Never looks at tensors."""
    if isinstance(key, str):
        return key
    parts = key if isinstance(key, tuple) else (key,)
    is_plain = all(part is None or isinstance(part, PLAIN) for part in parts)
    return f"[{key!r}]" if is_plain else f"[{type(key).__name__} {id(key)}]"


def join(path: str, name: str) -> str:
    """A path and one step of it, an attribute or an index in brackets."""
    return path + name if name.startswith("[") else f"{path}.{name}" if path else name
