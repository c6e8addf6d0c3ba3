"""Gradients of inputs first and those of parameters later: the same bits, and no product computed twice."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from graphstep.capture.gradients import leaves_reached
from graphstep.capture.split_backward import SplitBackward, TensorHooks


class Operations(TorchDispatchMode):
    """Counts what runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.counts[func.name().removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


class Twice(torch.autograd.Function):
    """``x @ w``, in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return gradients[0] @ w.T, x.T @ gradients[0]


class Case(nn.Module):
    """Some weights for the functions below."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.norm = nn.LayerNorm(6)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.square = nn.Parameter(torch.eye(6) + 0.25)
        self.num_hook_calls = 0


def mlp(case: Case, x: Tensor) -> Tensor:
    return x + case.second(functional.gelu(case.first(case.norm(x))))


def shared_side_by_side(case: Case, x: Tensor) -> Tensor:
    return case.first(x) * case.first(x.tanh())


def shared_in_a_row(case: Case, x: Tensor) -> Tensor:
    return case.first(torch.tanh(case.first(x))) + case.second(x)


def computed_weight(case: Case, x: Tensor) -> Tensor:
    weight = case.square * case.scale
    return x @ weight + (x.sin() @ weight)


def computed_weight_in_a_row(case: Case, x: Tensor) -> Tensor:
    weight = case.square * case.scale
    return (x @ weight).sin() @ weight


def in_python(case: Case, x: Tensor) -> Tensor:
    result: Tensor = Twice.apply(case.first(x), case.square)  # type: ignore[no-untyped-call]
    return result


def hooked(case: Case, x: Tensor) -> Tensor:
    y = case.first(x)

    def doubled(gradient: Tensor) -> Tensor:
        case.num_hook_calls += 1
        return gradient * 2

    y.register_hook(doubled)
    return y.tanh() + case.second(x)


def several_results(case: Case, x: Tensor) -> tuple[Tensor, ...]:
    first, second = case.first(x).chunk(2, dim=1)
    return first, second * 2, case.square * case.scale, case.scale.exp()


def recurrent(case: Case, x: Tensor) -> Tensor:
    state = torch.zeros_like(x)
    for _ in range(3):
        state = torch.tanh(case.second(state) + case.first(x))
    return state


def recomputed(case: Case, x: Tensor) -> Tensor:
    result: Tensor = checkpoint(case.first, x, use_reentrant=False)
    return result + case.second(x)


def without_weights(_case: Case, x: Tensor) -> Tensor:
    return x.sin().exp()


FUNCTIONS: list[Callable[[Case, Tensor], Any]] = [
    mlp,
    shared_side_by_side,
    shared_in_a_row,
    computed_weight,
    computed_weight_in_a_row,
    in_python,
    hooked,
    several_results,
    recurrent,
    recomputed,
    without_weights,
]


def backward(function: Callable[[Case, Tensor], Any], *, is_split: bool, wants_input: bool = True) -> dict[str, Any]:
    torch.manual_seed(0)
    case, x = Case(), torch.randn(4, 6, requires_grad=wants_input)
    with TensorHooks() as hooks:
        result = function(case, x)
    results = result if isinstance(result, tuple) else (result,)
    outputs = [each for each in results if each.requires_grad]
    gradients = [torch.randn(each.shape) for each in outputs]
    inputs = [x] if wants_input else []
    parameters = [leaf for leaf in leaves_reached(outputs) if leaf is not x]
    found: Sequence[Tensor | None]
    if is_split:
        split = SplitBackward(outputs, gradients, inputs, parameters, is_undivided=hooks.were_registered)
        del result, results, outputs
        first = split.input_gradients()
        found = (*first, *split.parameter_gradients())
        assert hooks.were_registered is (function is hooked)
    else:
        wanted = [*inputs, *parameters]
        found = torch.autograd.grad(outputs, wanted, gradients, allow_unused=True) if wanted else ()
    names = {id(parameter): name for name, parameter in case.named_parameters()}
    keys = [*("x" for _ in inputs), *(names[id(each)] for each in parameters)]
    return {**dict(zip(keys, found, strict=True)), "hooks": case.num_hook_calls}


@pytest.mark.parametrize("wants_input", [True, False])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_both_parts_give_the_gradients_of_one_pass(function: Callable[[Case, Tensor], Any], wants_input: bool) -> None:
    if function is without_weights and not wants_input:
        return
    expected = backward(function, is_split=False, wants_input=wants_input)
    found = backward(function, is_split=True, wants_input=wants_input)
    assert list(found) == list(expected)
    assert found.pop("hooks") == expected.pop("hooks")
    for name, gradient in expected.items():
        assert gradient is not None, name
        assert torch.equal(gradient, found[name]), name


@pytest.mark.parametrize("function", [mlp, shared_side_by_side, computed_weight, several_results])
def test_each_part_has_its_own_products_and_none_is_computed_twice(function: Callable[[Case, Tensor], Any]) -> None:
    torch.manual_seed(0)
    case, x = Case(), torch.randn(4, 6, requires_grad=True)
    result = function(case, x)
    outputs = list(result if isinstance(result, tuple) else (result,))
    gradients = [torch.randn(each.shape) for each in outputs]
    parameters = [leaf for leaf in leaves_reached(outputs) if leaf is not x]
    with Operations() as inputs_alone:
        torch.autograd.grad(outputs, x, gradients, retain_graph=True, allow_unused=True)
    with Operations() as parameters_alone:
        torch.autograd.grad(outputs, parameters, gradients, retain_graph=True)
    with Operations() as whole:
        torch.autograd.grad(outputs, [x, *parameters], gradients, retain_graph=True)
    split = SplitBackward(outputs, gradients, [x], parameters)
    with Operations() as first:
        split.input_gradients()
    with Operations() as second:
        split.parameter_gradients()
    assert first.counts == inputs_alone.counts
    assert first.counts["mm"] + second.counts["mm"] == whole.counts["mm"] > 0
    assert second.counts["mm"] < parameters_alone.counts["mm"] or function is not mlp
    assert first.counts["gelu_backward"] + second.counts["gelu_backward"] == whole.counts["gelu_backward"]


def test_what_the_second_part_needs_is_let_go_after_it() -> None:
    torch.manual_seed(0)
    case, x = Case(), torch.randn(4, 6, requires_grad=True)
    result = mlp(case, x)
    node = weakref.ref(result.untyped_storage())
    split = SplitBackward([result], [torch.ones_like(result)], [x], list(case.parameters())[:3])
    del result
    split.input_gradients()
    gc.collect()
    assert node() is not None
    split.parameter_gradients()
    gc.collect()
    assert node() is None


def test_undivided_gives_everything_in_the_first_part() -> None:
    torch.manual_seed(0)
    case, x = Case(), torch.randn(4, 6, requires_grad=True)
    result = mlp(case, x)
    parameters = [leaf for leaf in leaves_reached([result]) if leaf is not x]
    split = SplitBackward([result], [torch.ones_like(result)], [x], parameters, is_undivided=True)
    split.input_gradients()
    with Operations() as second:
        found = split.parameter_gradients()
    assert not second.counts
    assert all(gradient is not None for gradient in found)
