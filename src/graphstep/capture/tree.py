"""Arguments and results as a flat list of tensors and a structure that can be compared, hashed and rebuilt.

Tensors are leaves; containers, dataclasses and plain objects are nodes; anything else is a value that is part of the
structure, so that a replay with another value is noticed. A structure is not affected by what happens later to the
objects it was made from.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


@dataclass(frozen=True, slots=True)
class Node:
    """One node of a structure: its kind, the names of its children, and the children."""

    kind: type | None
    """Container type, or ``None`` for a tensor."""
    names: tuple[Any, ...] = ()
    children: tuple[Node | Value, ...] = ()


@dataclass(frozen=True, slots=True)
class Value:
    """A leaf that is not a tensor. Compared by type and equality; objects without equality by identity.

    Numbers are compared as bits: NaN equals NaN, and 0.0 differs from -0.0. Sets and arrays are held as copies.
    """

    value: Any

    def __hash__(self) -> int:
        try:
            return hash((type(self.value), _comparable(self.value)))
        except TypeError:
            return hash(type(self.value))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Value) or type(self.value) is not type(other.value):
            return False
        if self.value is other.value:
            return True
        try:
            return bool(_comparable(self.value) == _comparable(other.value))
        except (TypeError, ValueError, RuntimeError):
            return False


_TENSOR = Node(kind=None)


def flatten(value: Any) -> tuple[list[Tensor], Node | Value]:
    """The tensors of a nested value, depth first, and its structure."""
    tensors: list[Tensor] = []
    return tensors, _flatten(value, tensors, frozenset())


def _flatten(value: Any, tensors: list[Tensor], above: frozenset[int]) -> Node | Value:
    if isinstance(value, Tensor):
        tensors.append(value)
        return _TENSOR
    if isinstance(value, Mapping):
        names = tuple(value)
        return Node(type(value), names, tuple(_flatten(value[name], tensors, above) for name in names))
    if isinstance(value, (list, tuple)):
        fields = getattr(value, "_fields", None)
        names = tuple(fields) if fields is not None else tuple(range(len(value)))
        return Node(type(value), names, tuple(_flatten(item, tensors, above) for item in value))
    if _has_attributes(value) and id(value) not in above:
        names = _attributes_of(value)
        inside = above | {id(value)}  # An object may point back to the one that holds it.
        return Node(type(value), names, tuple(_flatten(getattr(value, name), tensors, inside) for name in names))
    return Value(_private(value))


def _has_attributes(value: Any) -> bool:
    """True for what is no more than its attributes: dataclasses, namespaces and objects that ``copy`` copies so.

    A copy of an optimizer would not be the one that the caller has.
    """
    if isinstance(value, (type, str, bytes, int, float, Optimizer, LRScheduler, GradScaler)) or value is None:
        return False
    if dataclasses.is_dataclass(value) or isinstance(value, SimpleNamespace):
        return True
    kind: Any = type(value)
    is_plain = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    has_some = hasattr(value, "__dict__") or bool(_slots_of(kind))
    return is_plain and has_some and not callable(value) and not isinstance(value, ModuleType)


def _slots_of(kind: type) -> tuple[str, ...]:
    names: dict[str, None] = {}
    for each in kind.__mro__:
        slots = each.__dict__.get("__slots__", ())
        names.update(dict.fromkeys((slots,) if isinstance(slots, str) else slots))
    return tuple(name for name in names if name not in {"__dict__", "__weakref__"} and not name.startswith("__"))


def _attributes_of(value: Any) -> tuple[str, ...]:
    fields = [field.name for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    names = dict.fromkeys([*fields, *_slots_of(type(value)), *getattr(value, "__dict__", ())])
    return tuple(name for name in names if hasattr(value, name))


def _private(value: Any) -> Any:
    """The value, or a copy if its owner could change it without its identity or equality telling."""
    if isinstance(value, (set, bytearray, np.ndarray)):
        return value.copy()
    return value


def _comparable(value: Any) -> Any:
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, complex):
        return value.real.hex(), value.imag.hex()
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    return value


def unflatten(structure: Node | Value, tensors: Sequence[Tensor]) -> Any:
    """The nested value with the given tensors in place of its own.

    Containers come back in their own type; dataclasses and plain objects are made without running ``__init__``, so
    that frozen ones and computed fields come back as they were.
    """
    supply = iter(tensors)
    return _unflatten(structure, supply)


def _unflatten(structure: Node | Value, supply: Iterator[Tensor]) -> Any:
    if isinstance(structure, Value):
        return _private(structure.value)
    kind = structure.kind
    if kind is None:
        return next(supply)
    children = [_unflatten(child, supply) for child in structure.children]
    if issubclass(kind, Mapping):
        pairs = dict(zip(structure.names, children, strict=True))
        if issubclass(kind, collections.defaultdict):
            return kind(None, pairs)  # What a missing key would give belongs to who made the dict.
        return _mapping(kind, pairs)
    if issubclass(kind, (list, tuple)):
        return kind(*children) if hasattr(kind, "_fields") else kind(children)
    made = kind() if issubclass(kind, SimpleNamespace) else object.__new__(kind)
    for name, child in zip(structure.names, children, strict=True):
        object.__setattr__(made, name, child)
    return made


def _mapping(kind: Any, pairs: dict[Any, Any]) -> Any:
    if hasattr(kind, "__dataclass_fields__"):
        return kind(**pairs)  # A dict whose constructor takes its entries by name, as results of models do.
    return pairs if kind is dict else kind(pairs)


def values_of(structure: Node | Value) -> Iterator[Any]:
    """Everything in a structure that is no tensor and no container."""
    if isinstance(structure, Value):
        yield structure.value
    else:
        for child in structure.children:
            yield from values_of(child)


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


def argument_places(structure: Node | Value) -> list[tuple[Any, int]]:
    """For each tensor of ``(arguments, named)``: the position or keyword of its argument, and its number in it."""
    if isinstance(structure, Value):
        return []
    return [
        (name, number)
        for part in structure.children
        if isinstance(part, Node)
        for name, child in zip(part.names, part.children, strict=True)
        for number in range(len(tensor_paths(child)))
    ]


def step_of(kind: type, name: Any) -> str:
    """One step of a path: an index, a key or an attribute."""
    if issubclass(kind, Mapping):
        return f"[{name!r}]"
    if issubclass(kind, (list, tuple)) and not hasattr(kind, "_fields"):
        return f"[{name}]"
    return f".{name}"
