"""A forward cut at submodules computes what it computes as a whole, or says why it cannot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphstep.hugging_face.cut_forward import CutForward, Handed, UncutError


class Block(nn.Module):
    """Two submodules to cut at, and values that live across the cuts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.inner = Inner()

    def forward(self, x: Tensor, scale: Tensor | None = None, *, twice: bool = False) -> Tensor:
        residual = x
        y = self.norm(x)
        rows, width = y.shape
        y = self.first(y.view(rows, width))
        y = torch.relu(y) + residual
        if scale is not None:
            y = y * scale
        kept = [y * 2, (y * 3, "text")]
        z = self.inner(y)
        if twice:
            z = z + z
        return z + kept[0] + kept[1][0]


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts, self.after = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.gate(x), -1)
        return self.after(self.experts(x) * weights) + x


def run(cut: CutForward, *arguments: Any, **named: Any) -> tuple[Any, list[Handed]]:
    """All parts in turn; returns the result and what was handed on."""
    handed: list[Handed] = []
    first, others = arguments[0], arguments[1:]
    result = cut.run(cut.module.forward, 0, first, others, named)
    while isinstance(result, Handed):
        handed.append(result)
        inside, by_name = result.call_of(first, others, named)
        made = cut.holes[result.hole](*inside, **by_name)
        given = (made, result.script, result.live)
        result = cut.run(cut.module.forward, len(handed), given, others, named)
    return result, handed


def holes_of(block: Block, names: Sequence[str]) -> list[nn.Module]:
    return [block.get_submodule(name) for name in names]


@pytest.mark.parametrize(
    "names",
    [
        *(("first",), ("inner.experts",), ("first", "inner.experts"), ("first", "inner"), ("norm",)),
        ("norm", "first", "inner.gate", "inner.experts", "inner.after"),
    ],
    ids="+".join,
)
@pytest.mark.parametrize("scale", [False, True])
def test_parts_compute_the_whole(names: tuple[str, ...], scale: bool) -> None:
    torch.manual_seed(0)
    block = Block()
    cut = CutForward(block, holes_of(block, names), "block")
    for index in range(3):
        found = []
        for is_cut in (False, True):
            block.zero_grad()
            torch.manual_seed(index)
            x = torch.randn(5, 4, requires_grad=True)
            given = (torch.rand(4),) if scale else ()
            result = run(cut, x, *given, twice=True)[0] if is_cut else block(x, *given, twice=True)
            result.square().sum().backward()
            found.append([result, x.grad, *(p.grad for p in block.parameters() if p.grad is not None)])
        assert all(map(torch.equal, *found))


def test_only_what_is_read_later_is_handed_on() -> None:
    block = Block()
    cut = CutForward(block, holes_of(block, ["inner.experts"]), "block")
    _, (handed,) = run(cut, torch.randn(5, 4))
    assert len(handed.live) == 2 + 2  # kept, and x and weights of the inner module; not y, z or residual
    assert not handed.has_given


def test_arguments_are_not_passed_through() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.Bilinear(4, 4, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x + self.attention(x, mask)

    block = Plain()
    cut = CutForward(block, [block.attention], "plain")
    x, mask = torch.randn(3, 4), torch.randn(3, 4)
    result, (handed,) = run(cut, x, mask)
    assert torch.equal(result, block(x, mask))
    assert handed.has_given
    assert not any(isinstance(value, Tensor) for value in handed.arguments)
    (live,) = handed.live
    assert torch.equal(live, x)
    assert live.data_ptr() != x.data_ptr()  # in memory of its own, as a replay returns it


def test_the_same_calls_have_the_same_script() -> None:
    block = Block()
    cut = CutForward(block, holes_of(block, ["inner.experts"]), "block")
    numbers = [run(cut, torch.randn(rows, 4), **named)[1][0].script for rows in (5, 5, 6) for named in ({},)]
    assert numbers == [0, 0, 1]  # the shape is a value that was read


def test_submodules_run_once_with_their_hooks() -> None:
    block = Block()
    calls: list[str] = []
    for name in ("norm", "first", "inner.gate", "inner.experts", "inner.after"):
        block.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.append(name))
    run(CutForward(block, holes_of(block, ["inner.experts"]), "block"), torch.randn(5, 4))
    assert calls == ["norm", "first", "inner.gate", "inner.experts", "inner.after"]
    assert "_compiled_call_impl" not in vars(block.norm)


def test_random_numbers_are_drawn_once() -> None:
    class Noisy(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None, *, twice: bool = False) -> Tensor:
            noise = torch.rand_like(x)
            y = self.first(x)
            return y * noise + torch.rand_like(y)

    block = Noisy()
    x = torch.randn(5, 4)
    torch.manual_seed(1)
    expected = block(x)
    torch.manual_seed(1)
    assert torch.equal(run(CutForward(block, [block.first], "noisy"), x)[0], expected)


def test_a_hole_that_is_not_called() -> None:
    class Sometimes(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None, *, twice: bool = False) -> Tensor:
            return self.first(x) if twice else self.second(x)

    block = Sometimes()
    cut = CutForward(block, [block.first], "sometimes")
    x = torch.randn(5, 4)
    assert torch.equal(run(cut, x)[0], block.second(x))
    assert torch.equal(run(cut, x, twice=True)[0], block.first(x))


def test_code_that_runs_otherwise_the_second_time_is_refused() -> None:
    class Counting(Block):
        count = 0

        def forward(self, x: Tensor, scale: Tensor | None = None, *, twice: bool = False) -> Tensor:
            self.count += 1
            y = torch.relu(x) if self.count == 1 else torch.tanh(x)
            return self.first(y) + y

    block = Counting()
    with pytest.raises(UncutError, match="called tanh where it called relu before") as caught:
        run(CutForward(block, [block.first], "counting"), torch.randn(5, 4))
    assert "where: counting" in str(caught.value)


def test_a_tensor_that_is_in_no_variable_is_refused() -> None:
    class OnTheStack(Block):
        def forward(self, x: Tensor, scale: Tensor | None = None, *, twice: bool = False) -> Tensor:
            return torch.relu(x) + self.first(x)

    block = OnTheStack()
    with pytest.raises(UncutError, match="not kept in a variable"):
        run(CutForward(block, [block.first], "stack"), torch.randn(5, 4))


def test_hooks_that_would_run_twice_are_refused() -> None:
    block = Block()
    cut = CutForward(block, holes_of(block, ["inner.experts"]), "block")
    calls: list[int] = []
    block.inner.register_forward_hook(lambda *_: calls.append(1))
    run(cut, torch.randn(5, 4))
    assert calls == [1]
    block.inner.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(UncutError, match="hooks before Inner once more"):
        run(cut, torch.randn(5, 4))


def test_errors_of_the_forward_are_its_own() -> None:
    block = Block()
    cut = CutForward(block, [block.first], "block")
    with pytest.raises(RuntimeError, match="normalized_shape"):
        run(cut, torch.randn(5, 3))
    assert "_compiled_call_impl" not in vars(block.norm)
    x = torch.randn(5, 4)
    assert torch.equal(run(cut, x)[0], block(x))
