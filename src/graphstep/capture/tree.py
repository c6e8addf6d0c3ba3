"""Arguments and results as a flat list of tensors and a structure that can be compared, hashed and rebuilt.

Tensors are leaves; dicts, lists, tuples, named tuples and dataclasses are nodes; anything else is a value that is part
of the structure, so that a replay with another value is noticed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a structure: its kind, the names of its children, and the children."""

    kind: type | None
    """Container type, or ``None`` for a tensor."""
    names: tuple[Any, ...] = ()
    children: tuple[Node | Value, ...] = ()


@dataclass(frozen=True, slots=True)
class Value:
    """A leaf that is not a tensor. Compared by type and equality; objects without equality by identity."""

    value: Any

    def __hash__(self) -> int:
        try:
            return hash((type(self.value), self.value))
        except TypeError:
            return hash(type(self.value))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Value) or type(self.value) is not type(other.value):
            return False
        if self.value is other.value:
            return True
        try:
            return bool(self.value == other.value)
        except (TypeError, ValueError, RuntimeError):
            return False


_TENSOR = Node(kind=None)


def flatten(value: Any) -> tuple[list[Tensor], Node | Value]:
    """The tensors of a nested value, depth first, and its structure."""
    tensors: list[Tensor] = []
    return tensors, _flatten(value, tensors)


def _flatten(value: Any, tensors: list[Tensor]) -> Node | Value:
    if isinstance(value, Tensor):
        tensors.append(value)
        return _TENSOR
    if isinstance(value, Mapping):
        names = tuple(value)
        return Node(type(value), names, tuple(_flatten(value[name], tensors) for name in names))
    if isinstance(value, (list, tuple)):
        fields = getattr(value, "_fields", None)
        names = tuple(fields) if fields is not None else tuple(range(len(value)))
        return Node(type(value), names, tuple(_flatten(item, tensors) for item in value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value))
        return Node(type(value), names, tuple(_flatten(getattr(value, name), tensors) for name in names))
    return Value(value)


def unflatten(structure: Node | Value, tensors: Sequence[Tensor]) -> Any:
    """The nested value with the given tensors in place of its own.

    Mappings come back as plain dicts unless their type can be made from pairs; dataclasses are made without running
    ``__init__``, so that frozen ones and computed fields come back as they were.
    """
    supply = iter(tensors)
    return _unflatten(structure, supply)


def _unflatten(structure: Node | Value, supply: Iterator[Tensor]) -> Any:
    if isinstance(structure, Value):
        return structure.value
    kind = structure.kind
    if kind is None:
        return next(supply)
    children = [_unflatten(child, supply) for child in structure.children]
    if issubclass(kind, Mapping):
        pairs = dict(zip(structure.names, children, strict=True))
        return pairs if kind is dict else kind(pairs)  # type: ignore[call-arg]
    if issubclass(kind, (list, tuple)):
        return kind(*children) if hasattr(kind, "_fields") else kind(children)
    made = object.__new__(kind)
    for name, child in zip(structure.names, children, strict=True):
        object.__setattr__(made, name, child)
    return made


def tensor_paths(structure: Node | Value, root: str = "") -> list[str]:
    """How the user would write each tensor of the structure: ``['tokens']``, ``[0].mask``."""
    if isinstance(structure, Value):
        return []
    if structure.kind is None:
        return [root]
    return [
        path
        for name, child in zip(structure.names, structure.children, strict=True)
        for path in tensor_paths(child, root + step_of(structure.kind, name))
    ]


def step_of(kind: type, name: Any) -> str:
    """One step of a path: an index, a key or an attribute."""
    if issubclass(kind, Mapping):
        return f"[{name!r}]"
    if issubclass(kind, (list, tuple)) and not hasattr(kind, "_fields"):
        return f"[{name}]"
    return f".{name}"
