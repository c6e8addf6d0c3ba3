"""Flat tensors and a structure: every kind of nesting comes back as it was, and every change of a value is seen."""

from __future__ import annotations

import collections
import dataclasses
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from graphstep.capture.tree import argument_places, flatten, tensor_paths, unflatten


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Packed:
    cu_seqlens: Tensor
    max_seqlen: int
    mask: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any
    doubled: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", self.value * 2)


@dataclasses.dataclass(slots=True)
class Slotted:
    value: Any


class Output(collections.OrderedDict[str, Any]):
    """A dict with attribute access, like the outputs of model libraries."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Plain:
    """An ordinary object: no dataclass, no equality."""

    def __init__(self, value: Any) -> None:
        self.value = value


def t(value: float = 0.0) -> Tensor:
    return torch.full((2,), value)


NESTINGS = {
    "tensor": t(1),
    "dict": {"a": t(1), "b": 2, 3: t(4)},
    "empty dict": {},
    "list": [t(1), None, "text"],
    "tuple": (t(1), (), [t(2)]),
    "named tuple": Point(t(1), {"deep": t(2)}),
    "dataclass": Packed(t(1), 7),
    "frozen dataclass": Frozen(t(3)),
    "dataclass with slots": Slotted([t(1)]),
    "ordered dict": collections.OrderedDict(z=t(1), a=t(2)),
    "default dict": collections.defaultdict(list, {"a": t(1)}),
    "user's dict": Output(loss=t(1)),
    "read-only mapping": MappingProxyType({"a": t(1)}),
    "result of torch.max": torch.max(torch.arange(6.0).view(2, 3), dim=1),
    "size": torch.Size([2, 3]),
    "plain object": Plain(t(1)),
    "namespace": SimpleNamespace(a=t(1), b=[t(2)]),
    "none": None,
    "values": {"i": 1, "f": 0.5, "s": "text", "b": True, "n": None, "d": torch.float32, "t": int},
    "nested": {"batch": [Packed(t(1), 3, t(2)), Point((t(3),), None)], "scale": 2.0},
}


def same(mine: Any, theirs: Any) -> bool:  # noqa: PLR0911
    if type(mine) is not type(theirs):
        return False
    if isinstance(mine, Tensor):
        return torch.equal(mine, theirs)
    if isinstance(mine, (dict, MappingProxyType)):
        return list(mine) == list(theirs) and all(same(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, (list, tuple)):
        return len(mine) == len(theirs) and all(map(same, mine, theirs))
    if dataclasses.is_dataclass(mine) and not isinstance(mine, type):
        names = [field.name for field in dataclasses.fields(mine)]
        return all(same(getattr(mine, name), getattr(theirs, name)) for name in names)
    if isinstance(mine, (Plain, SimpleNamespace)):
        return same(vars(mine), vars(theirs))
    return bool(mine == theirs)


@pytest.mark.parametrize("name", NESTINGS)
def test_a_nesting_comes_back_as_it_was(name: str) -> None:
    value = NESTINGS[name]
    tensors, structure = flatten(value)
    assert same(unflatten(structure, tensors), value)


@pytest.mark.parametrize("name", NESTINGS)
def test_equal_nestings_have_equal_structures(name: str) -> None:
    tensors, first = flatten(NESTINGS[name])
    rebuilt = unflatten(first, [tensor.clone() for tensor in tensors])
    _, second = flatten(rebuilt)
    assert first == second
    assert hash(first) == hash(second)


@pytest.mark.parametrize("name", NESTINGS)
def test_there_is_one_path_for_each_tensor(name: str) -> None:
    tensors, structure = flatten(NESTINGS[name])
    assert len(tensor_paths(structure, "x")) == len(tensors) == len(set(tensor_paths(structure, "x")))


def test_other_tensors_take_the_places_of_the_old_ones() -> None:
    _, structure = flatten({"a": t(1), "b": Packed(t(2), 5)})
    rebuilt = unflatten(structure, [t(10), t(20)])
    assert torch.equal(rebuilt["a"], t(10))
    assert torch.equal(rebuilt["b"].cu_seqlens, t(20))
    assert rebuilt["b"].max_seqlen == 5


def test_paths_read_as_the_user_writes_them() -> None:
    _, structure = flatten([{"tokens": t(), "packed": Packed(t(), 1, t())}, Point(t(), (t(),))])
    assert tensor_paths(structure, "batches") == [
        "batches[0]['tokens']",
        "batches[0]['packed'].cu_seqlens",
        "batches[0]['packed'].mask",
        "batches[1].x",
        "batches[1].y[0]",
    ]


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, {"a": True}),
        ({"a": None}, {"a": 0}),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ([1], (1,)),
        (Point(1, 2), (1, 2)),
        (Packed(t(), 1), Packed(t(), 2)),
        (Packed(t(), 1), Packed(t(), 1, t())),
        (t(), None),
        ("1", 1),
        (torch.float32, torch.float16),
        (Plain(1), Plain(2)),
        (np.zeros(3), np.ones(3)),
        ({1}, {1, 2}),
    ],
)
def test_a_change_is_a_difference(mine: Any, theirs: Any) -> None:
    assert flatten(mine)[1] != flatten(theirs)[1]


def mutate_set(value: set[int]) -> None:
    value.add(99)


def mutate_array(value: np.ndarray) -> None:
    value[0] = 99


def mutate_object(value: Any) -> None:
    value.value = 99


@pytest.mark.parametrize(
    ("value", "mutate"),
    [
        ({1, 2}, mutate_set),
        (np.zeros(3), mutate_array),
        (bytearray(b"abc"), lambda value: value.extend(b"d")),
        (Plain(1), mutate_object),
        (SimpleNamespace(value=1), mutate_object),
        (Slotted(1), mutate_object),
        ({"a": [1]}, lambda value: value["a"].append(2)),
    ],
    ids=["set", "array", "bytearray", "object", "namespace", "dataclass", "list in a dict"],
)
def test_an_object_changed_in_place_is_a_difference(value: Any, mutate: Any) -> None:
    _, before = flatten(value)
    mutate(value)
    assert flatten(value)[1] != before


def test_a_tensor_in_an_ordinary_object_is_an_input() -> None:
    packed = SimpleNamespace(cu_seqlens=t(1), max_seqlen=3)
    tensors, structure = flatten({"packed": packed})
    assert [tensor is packed.cu_seqlens for tensor in tensors] == [True]
    assert tensor_paths(structure, "batch") == ["batch['packed'].cu_seqlens"]


def test_none_is_not_a_tensor() -> None:
    assert flatten({"mask": None})[0] == []


def test_each_tensor_of_a_call_has_a_place() -> None:
    """So that an argument is found again in another call, where more or fewer tensors come before it."""
    x, y, z = torch.zeros(1), torch.ones(1), torch.ones(2)
    several = flatten((((x, y), 3, z), {"mask": [x, y]}))[1]
    one = flatten(((x, 3, z), {"mask": [x, y]}))[1]
    assert argument_places(several) == [(0, 0), (0, 1), (2, 0), ("mask", 0), ("mask", 1)]
    assert argument_places(one) == [(0, 0), (2, 0), ("mask", 0), ("mask", 1)]
