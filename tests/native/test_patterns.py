"""What the arguments of a call look like: what surely fits, and what has to be looked at closer."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import graphstep
from graphstep.capture.signature import Signature
from graphstep.config import CudaGraphConfig, CudaGraphImpl
from graphstep.native.build import VARIABLE
from graphstep.native.interface import FastPath, Pattern
from graphstep.strategies.local_calls import RegionCalls
from graphstep.strategies.relays import pattern_of

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Way(enum.Enum):
    """A value without an order."""

    LEFT = 1
    RIGHT = 2


class Couple(NamedTuple):
    """A tuple of another kind."""

    first: Tensor
    second: Tensor


def call(**changes: Any) -> Call:
    """A call with tensors and values of every kind."""
    given = {
        "x": torch.zeros(2, 3, requires_grad=True),
        "pair": (torch.zeros(2), [torch.ones(1), None]),
        "mask": torch.zeros(3, dtype=torch.bool),
        "scale": 0.5,
        "count": 3,
        "name": "a",
        "way": Way.LEFT,
        "flag": True,
        "table": {"a": torch.zeros(1), "b": 1},
        **changes,
    }
    return (given.pop("x"), given.pop("pair")), given


def pattern(fast: FastPath, sample: Call) -> Pattern:
    """Of a call like the sample."""
    found = pattern_of(fast, Signature.of(sample, device_type="cpu"))
    assert found is not None
    return found


def test_tensors_come_in_the_order_of_the_signature(fast: FastPath) -> None:
    (x, pair), named = arguments, words = call()
    expected = (x, pair[0], pair[1][0], named["mask"], named["table"]["a"])
    found = pattern(fast, call()).flat(arguments, words)
    assert found is not None
    assert list(map(id, found)) == list(map(id, expected))


@pytest.mark.parametrize(
    "change",
    [
        {"x": torch.zeros(2, 3)},
        {"x": torch.zeros(3, 2, requires_grad=True)},
        {"x": torch.zeros(3, 2).t().requires_grad_()},
        {"x": torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)},
        {"x": torch.zeros(2, 3, device="meta", requires_grad=True)},
        {"x": nn.Parameter(torch.zeros(2, 3))},
        {"x": torch.zeros(2, 3).to_sparse().requires_grad_()},
        {"x": None},
        {"pair": [torch.zeros(2), [torch.ones(1), None]]},
        {"pair": (torch.zeros(2), (torch.ones(1), None))},
        {"pair": (torch.zeros(2), [torch.ones(1)])},
        {"pair": (torch.zeros(2), [torch.ones(1), 0])},
        {"pair": Couple(torch.zeros(2), torch.ones(1))},
        {"scale": 0.25},
        {"scale": -0.0},
        {"scale": 1},
        {"count": 4},
        {"count": True},
        {"name": "b"},
        {"way": Way.RIGHT},
        {"flag": 1},
        {"table": {"b": 1, "a": torch.zeros(1)}},
        {"table": {"a": torch.zeros(1)}},
        {"extra": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_the_signature_tells_apart_does_not_fit(fast: FastPath, change: dict[str, Any]) -> None:
    sample, other = call(), call(**change)
    assert pattern(fast, sample).flat(*other) is None
    assert pattern(fast, sample).flat(*call()) is not None


def test_one_tensor_in_two_places_does_not_fit(fast: FastPath) -> None:
    x, y = torch.zeros(2), torch.zeros(2)
    found = pattern(fast, ((x, y), {}))
    assert found.flat((x, x), {}) is None
    assert found.flat((y, x), {}) is not None
    assert pattern_of(fast, Signature.of(((x, x), {}), device_type="cpu")) is None


def test_conjugates_and_negatives_do_not_fit(fast: FastPath) -> None:
    z = torch.zeros(2, dtype=torch.complex64)
    found = pattern(fast, ((z,), {}))
    assert found.flat((z.conj(),), {}) is None
    assert pattern(fast, ((z.conj(),), {})).flat((z.conj(),), {}) is not None
    assert pattern(fast, ((z.conj().imag,), {})).flat((z.imag,), {}) is None


def test_dicts_with_any_keys_are_known(fast: FastPath) -> None:
    given = {1: torch.zeros(1), "a": {2.5: torch.ones(1)}}
    assert pattern(fast, ((given,), {})).flat((given,), {}) is not None


def test_tuples_of_other_classes_are_left_to_python(fast: FastPath) -> None:
    given = Couple(torch.zeros(2), torch.ones(1))
    assert pattern_of(fast, Signature.of(((given,), {}), device_type="cpu")) is None


def test_what_is_no_pattern_is_refused(fast: FastPath) -> None:
    wrong: list[tuple[Any, ...]] = [
        (),
        ("tensor",),
        ("tensor", (1,), (1,), "float", torch.device("cpu"), False, False, False),
        ("other", ()),
        ("dict", (), ("a",)),
        ("tuple", [1]),
        ("tuple", ((),)),
    ]
    for tree in wrong:
        with pytest.raises((TypeError, ValueError)):
            fast.Pattern(tree, ("dict", (), ()))


class Worded(nn.Module):
    """Takes a pair, a word and a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given: tuple[Tensor, Tensor], *, scale: float, mode: str = "") -> tuple[Tensor, Tensor]:
        y: Tensor = torch.tanh(self.linear(given[0])) * scale + given[1]
        return y, y * (2 if mode else 1)


def test_calls_with_any_arguments_begin_a_run_at_once(fast: FastPath, monkeypatch: pytest.MonkeyPatch) -> None:
    del fast
    monkeypatch.setenv(VARIABLE, "required")

    def run(model: nn.Module, number: int, scale: float = 0.5) -> list[Tensor]:
        torch.manual_seed(number)
        x, z = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4)
        a, b = model((x, z), scale=scale, mode="m")
        (a.square().sum() + b.sum()).backward()
        found = [
            a.detach(),
            b.detach(),
            *(each.grad.clone() for each in (x, *model.parameters()) if each.grad is not None),
        ]
        model.zero_grad(set_to_none=False)
        return found

    looked: list[int] = []
    closer = RegionCalls._replayed
    monkeypatch.setattr(RegionCalls, "_replayed", lambda calls, *given: looked.append(1) or closer(calls, *given))
    torch.manual_seed(0)
    model = Worded()
    torch.manual_seed(0)
    reference = Worded()
    config = CudaGraphConfig(impl=CudaGraphImpl.local)
    with graphstep.attach(model, config, regions={"": "layer"}) as session:
        for number in range(3):
            run(model, number)
            session.end_step()
        looked.clear()
        for number in range(4):
            assert all(map(torch.equal, run(model, number), run(reference, number)))
            session.end_step()
        assert not looked
        assert all(map(torch.equal, run(model, 7, 0.25), run(reference, 7, 0.25)))
        assert looked, "another value is another call"
