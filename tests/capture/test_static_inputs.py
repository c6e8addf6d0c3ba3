"""Copies of a batch at fixed addresses: any layout, any nesting, refreshed as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from graphstep.capture.static_inputs import StaticInputs, to_device


@dataclass(frozen=True)
class Pair:
    left: Tensor
    right: Tensor | None


def addresses(static: StaticInputs) -> list[int]:
    found = static.arguments
    return [found["x"].data_ptr(), found["pair"].left.data_ptr()]


def make(value: float) -> dict[str, Any]:
    return {"x": torch.full((2, 3), value), "pair": Pair(torch.full((4,), value + 1), None), "name": "batch"}


def test_loading_writes_into_the_same_tensors(device: torch.device) -> None:
    static = StaticInputs(make(0.0), device)
    before = addresses(static)
    for value in (1.0, 2.0, 3.0):
        static.load(make(value))
        assert addresses(static) == before
        assert torch.equal(static.arguments["x"].cpu(), torch.full((2, 3), value))
        assert torch.equal(static.arguments["pair"].left.cpu(), torch.full((4,), value + 1))
    assert static.arguments["pair"].right is None
    assert static.arguments["name"] == "batch"


def test_the_callers_tensors_are_not_kept(device: torch.device) -> None:
    given = make(1.0)
    given["x"] = given["x"].to(device)
    static = StaticInputs(given, device)
    static.load(given)
    given["x"].fill_(9.0)
    assert torch.equal(static.arguments["x"].cpu(), torch.full((2, 3), 1.0))


def test_none_needs_no_memory(device: torch.device) -> None:
    assert StaticInputs({"mask": None, "flag": True}, device).nbytes == 0


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "sliced": lambda x: x[:, 1:],
    "every second": lambda x: x[::2, ::2],
    "expanded": lambda x: x[:1].expand(4, -1),
    "expanded scalar": lambda x: x[0, 0].expand(3, 3),
    "windows": lambda x: x.flatten().unfold(0, 4, 1),
    "empty": lambda x: x[:0],
    "scalar": lambda x: x[0, 0],
    "integer": lambda x: x.long(),
    "bool": lambda x: x > 5,
    "channels last": lambda x: torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_is_kept_and_refreshed(name: str, device: torch.device) -> None:
    change = LAYOUTS[name]
    first, second = (change(torch.arange(24.0).view(4, 6) + offset) for offset in (0, 100))
    static = StaticInputs([first], device)
    for given in (first, second, first):
        static.load([given])
        (copy,) = static.arguments
        assert copy.dtype == given.dtype
        assert torch.equal(copy.cpu(), given)
        assert copy.stride() == given.stride()


def test_to_device_leaves_what_is_there(device: torch.device) -> None:
    there, host = torch.zeros(3, device=device), torch.ones(2)
    moved = to_device({"a": there, "b": [host, 5], "c": Pair(host, None)}, device)
    assert moved["a"] is there
    assert moved["b"][0].device.type == device.type
    assert moved["b"][1] == 5
    assert moved["c"].right is None
