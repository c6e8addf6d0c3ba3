"""Regions with a result that is computed from another one, as a loss is from logits, and losses over either."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from tests.strategies.attach.plain import HIDDEN, attached, inputs
from torch import Tensor, nn
from torch.nn import functional

from graphstep.capture.reasons import EagerReason
from graphstep.capture.report import RegionStats
from graphstep.errors import LifecycleError

BODY = {"body": "body"}


class Named(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Data:
    first: Tensor
    second: Tensor


class Output(dict[str, Any]):
    """Entries that are attributes as well, as results of models are."""

    __getattr__ = dict.__getitem__


FORMS: Mapping[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda first, second: (first, second),
    "named tuple": Named,
    "dict": lambda first, second: {"first": first, "second": second},
    "output": lambda first, second: Output(first=first, second=second),
    "dataclass": Data,
    "namespace": lambda first, second: SimpleNamespace(first=first, second=second),
}


def both_of(result: Any) -> tuple[Tensor, Tensor]:
    if isinstance(result, Mapping):
        return result["first"], result["second"]
    return result if type(result) is tuple else (result.first, result.second)


class Body(nn.Module):
    """``num_uses``: how often the second result reads the first."""

    def __init__(self, form: str = "tuple", num_uses: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.form, self.num_uses, self.dropout = FORMS[form], num_uses, dropout
        self.latest: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        first = functional.dropout(torch.tanh(self.up(x)), self.dropout, self.training)
        inner = self.down(first)
        for number in range(1, self.num_uses):
            inner = inner * (first + number)
        return self.form(first, inner.square().mean())


class Keeping(Body):
    """Knows its latest result."""

    def forward(self, x: Tensor) -> Any:
        first, second = super().forward(x)
        self.latest = first
        return first, second


class Pieces(nn.Module):
    """Two results of one and the same node; the second one is not used by anything inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)

    def forward(self, x: Tensor) -> Any:
        second, first = self.up(x).chunk(2, -1)
        return first, second.tanh().mean() + second.mean()


class Model(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.inp, self.body = nn.Linear(HIDDEN, HIDDEN), body


USES: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a": lambda first, second: first.square().mean(),
    "b": lambda first, second: second,
    "ab": lambda first, second: second + first.exp().mean(),
    "0": lambda first, second: second + 0 * first.sum(),
}


def trained(
    body: Callable[[], nn.Module],
    uses: str,
    device: torch.device,
    *,
    watch: Callable[[Any, list[Tensor]], None] | None = None,
    graphs: bool = True,
) -> tuple[list[Tensor], RegionStats | None]:
    """Steps whose losses are over the results that ``uses`` names, one for each step, and all that they leave."""
    torch.manual_seed(3)
    model = Model(body()).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trace: list[Tensor] = []

    def steps() -> None:
        for number, use in enumerate(uses.split()):
            x = inputs(device, number).requires_grad_()
            result = model.body(model.inp(x))
            first, second = both_of(result)
            trace.extend([first.detach().clone(), second.detach().clone()])
            loss = USES[use](first, second)
            del first, second
            if watch is not None:
                watch(result, trace)
            loss.backward()
            del result, loss
            missing = torch.full((), torch.nan, device=device)
            trace.extend((missing if p.grad is None else p.grad).clone() for p in (x, *model.parameters()))
            optimizer.step()
            optimizer.zero_grad()

    if not graphs:
        steps()
        return trace, None
    with attached(model, BODY) as manager:
        steps()
        return trace, manager.report().rows[0]


def same(body: Callable[[], nn.Module], uses: str, device: torch.device, **options: Any) -> RegionStats:
    expected, _ = trained(body, uses, device, graphs=False, **options)
    found, row = trained(body, uses, device, **options)
    assert len(found) == len(expected)
    different = [n for n, pair in enumerate(zip(expected, found, strict=True)) if not _is_equal(*pair)]
    assert different == []
    assert row is not None
    assert row.num_replays == len(uses.split()) - 1
    return row


def _is_equal(expected: Tensor, found: Tensor) -> bool:
    return torch.equal(expected.nan_to_num(0.125), found.nan_to_num(0.125))


def num_again(row: RegionStats) -> int:
    return row.eager_calls[EagerReason.PARTIAL_BACKWARD]


@pytest.mark.parametrize("num_uses", [1, 2, 4])
@pytest.mark.parametrize("use", USES)
def test_the_backward_of_the_same_results_is_a_launch(device: torch.device, use: str, num_uses: int) -> None:
    row = same(lambda: Body(num_uses=num_uses), " ".join([use] * 6), device)
    assert num_again(row) == 0
    assert row.num_launches == 2 * row.num_replays


@pytest.mark.parametrize("form", FORMS)
def test_whatever_holds_the_results(device: torch.device, form: str) -> None:
    row = same(lambda: Body(form), "b b b b", device)
    assert (num_again(row), row.num_launches) == (0, 2 * 3)


@pytest.mark.parametrize(
    ("uses", "detail"),
    [
        ("b b ab b ab b", "result[0] of body has a gradient, and had none in the first step"),
        ("ab ab b ab b ab", "result[0] of body has no gradient, and had one in the first step"),
        ("a a ab a ab a", "result[1] of body has a gradient, and had none in the first step"),
        ("0 0 b ab b 0", "result[0] of body has no gradient, and had one in the first step"),
    ],
)
@pytest.mark.parametrize("num_uses", [1, 3])
def test_other_results_now_and_then(device: torch.device, uses: str, detail: str, num_uses: int) -> None:
    row = same(lambda: Body(num_uses=num_uses), uses, device)
    assert num_again(row) == 2
    assert row.num_launches == 2 * row.num_replays - 2
    assert row.last_detail == detail


def test_either_result_in_turn(device: torch.device) -> None:
    row = same(lambda: Body("dict"), "b a b a b a b", device)
    assert num_again(row) == 3
    assert row.last_detail == (
        "result['first'] of body has a gradient, and had none in the first step; "
        "result['second'] of body has no gradient, and had one in the first step"
    )


def test_the_report_says_so(device: torch.device) -> None:
    row = same(Body, "b ab b ab", device)
    (found,) = [each for each in row.to_json()["eager_reasons"] if each["code"] == "partial-backward"]
    assert found["reason"] == "computed again in the backward"
    assert found["num_calls"] == row.num_misses == 2
    assert "the same results" in found["advice"]


def test_a_result_that_its_node_alone_gives_no_gradient(device: torch.device) -> None:
    for use in ("a", "b"):
        row = same(Pieces, " ".join([use] * 4), device)
        assert (num_again(row), row.num_launches) == (0, 2 * 3)


def test_results_stay_what_they_are_in_the_first_step(device: torch.device) -> None:
    """Identity, hooks and kept gradients are those of eager training; hooks see plain tensors."""

    def watch(result: Any, trace: list[Tensor]) -> None:
        first, _ = result

        def note(gradient: Tensor) -> None:
            assert type(gradient) is Tensor
            trace.append(gradient.clone())

        first.retain_grad()
        first.register_hook(note)
        result[1].register_hook(lambda _gradient: trace.append(first.grad.clone()) if first.grad is not None else None)

    for num_uses in (1, 3):
        for use in ("a", "b", "ab"):
            body = Keeping(num_uses=num_uses)
            expected, _ = trained(lambda b=body: copy.deepcopy(b), use, device, watch=watch, graphs=False)
            found, _ = trained(lambda b=body: copy.deepcopy(b), use, device, watch=watch)
            assert len(expected) == len(found)
            assert all(map(_is_equal, expected, found))


def test_the_object_that_the_region_keeps_is_the_result(device: torch.device) -> None:
    model = Model(Keeping()).to(device)
    with attached(model, BODY):
        first, second = model.body(model.inp(inputs(device, 0)))
        assert model.body.latest is first
        second.backward()
        assert first.grad_fn is not None


def test_dropout(device: torch.device) -> None:
    """Where nothing can be computed again, another result is an error and no other gradient."""
    row = same(lambda: Body(dropout=0.2), "b b b b", device)
    assert (num_again(row), row.num_launches) == (0, 2 * 3)
    with pytest.raises(LifecycleError, match="use all results of the region in the first step's loss"):
        trained(lambda: Body(dropout=0.2), "b b ab", device)
    assert same(lambda: Body(dropout=0.2), "ab ab ab", device).num_launches == 2 * 2


def test_hooks_on_such_a_result_in_a_replay(device: torch.device) -> None:
    """They get what comes from outside of the region, as the documentation says."""
    model = Model(Body()).to(device)
    seen: list[Tensor | None] = []
    with attached(model, BODY) as manager:
        for number in range(4):
            first, second = model.body(model.inp(inputs(device, number)))
            first.register_hook(seen.append)
            roots = [second, first] if number < 3 else [second]
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
            del first, second, roots
            manager.end_step()
        assert manager.report().rows[0].num_replays == 3
    eager, *replays = seen
    assert eager is not None
    assert not torch.equal(eager, torch.ones_like(eager))
    assert all(torch.equal(each, torch.ones_like(eager)) for each in replays[:2] if each is not None)
    assert [each is None for each in replays] == [False, False, True]
