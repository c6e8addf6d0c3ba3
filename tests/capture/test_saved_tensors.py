"""What autograd keeps: dead static memory is NaN, and nothing that is alive."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.capture.chains import Layers, Model, straight
from tests.capture.pairs import backward_half, call, captured, forward_pair
from torch import Tensor, nn

from graphstep.capture.saved_tensors import SavedTensors, nodes_behind, poison
from graphstep.capture.session import GraphSession


def test_nodes_behind_results_end_where_they_are_told_to() -> None:
    x = torch.ones(3, requires_grad=True).exp()
    first = x.sin()
    results = [first, first.cos() + x]
    names = [type(node).__name__ for node in nodes_behind(results, ends=[x.grad_fn, None])]
    assert sorted(names) == ["AddBackward0", "CosBackward0", "SinBackward0"]
    assert len(nodes_behind(results)) == 5


def is_poisoned(tensor: Tensor) -> bool:
    return bool(tensor.isnan().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_floating_point_is_overwritten(device: torch.device, dtype: torch.dtype) -> None:
    tensor = torch.ones(2, 3, device=device, dtype=dtype)
    poison([tensor[:1]])
    assert is_poisoned(tensor[:1])
    assert torch.equal(tensor[1:], torch.ones_like(tensor[1:]))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.uint8])
def test_what_may_be_an_index_is_not(device: torch.device, dtype: torch.dtype) -> None:
    tensor = torch.ones(3, device=device, dtype=dtype)
    poison([tensor])
    assert torch.equal(tensor, torch.ones_like(tensor))


def test_autograd_has_no_say(device: torch.device) -> None:
    leaf = torch.ones(3, device=device, requires_grad=True)
    result = leaf * 2
    poison([leaf, result])
    assert is_poisoned(leaf.detach())
    assert leaf.is_leaf
    assert result.requires_grad


def test_what_the_body_made_and_saved_is_overwritten(device: torch.device) -> None:
    weight = torch.ones(3, 3, device=device, requires_grad=True)
    x, saved = torch.ones(3, device=device), SavedTensors()
    with saved.noted():
        inner = (x @ weight).exp()
        view = inner[:2]
        result = (view * view).tanh()
    saved.poison(keep=[result, None])
    assert is_poisoned(inner.detach())
    assert not result.isnan().any()
    assert torch.equal(weight.detach(), torch.ones_like(weight))
    assert torch.equal(x, torch.ones_like(x))


def test_views_of_what_was_there_before_are_left_alone(device: torch.device) -> None:
    weight = torch.ones(3, 3, device=device, requires_grad=True)
    x, saved = torch.ones(2, 3, device=device, requires_grad=True), SavedTensors()
    with saved.noted():
        torch.nn.functional.linear(x.view(2, 3), weight.t().t()).sum()
    saved.poison(keep=[])
    assert not weight.isnan().any()
    assert not x.isnan().any()


def test_memory_is_kept_whatever_view_of_it_is_named(device: torch.device) -> None:
    x, saved = torch.ones(4, device=device, requires_grad=True), SavedTensors()
    with saved.noted():
        inner = x.exp()
    saved.poison(keep=[inner[2:].detach()])
    assert not inner.isnan().any()


def test_what_was_noted_is_overwritten_once_and_let_go(device: torch.device) -> None:
    x, saved = torch.ones(4, device=device, requires_grad=True), SavedTensors()
    with saved.noted():
        inner = x.exp()
    saved.poison(keep=[])
    with torch.no_grad():
        inner.fill_(1.0)
    saved.poison(keep=[])
    assert not inner.isnan().any()


def test_gradients_pass_as_ever(device: torch.device) -> None:
    x, saved = torch.ones(4, device=device, requires_grad=True), SavedTensors()
    with saved.noted():
        result = x.exp().sin()
    (gradient,) = torch.autograd.grad(result.sum(), x)
    (expected,) = torch.autograd.grad(x.exp().sin().sum(), x)
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("merge", [1, 2])
def test_runs_equal_eager_while_poisoned(session: GraphSession, merge: int) -> None:
    model = Model(session, 3, merge=merge, poisons=True)
    for to_none in (True, False):
        for blocks in (model.eager, model.graphed):
            blocks.zero_grad(set_to_none=to_none)
        model.compare(straight)
    model.check_idle()


@pytest.mark.parametrize("num_run", [1, 2])
def test_runs_cut_short_equal_eager_while_poisoned(session: GraphSession, num_run: int) -> None:
    model = Model(session, 3, poisons=True)

    def cut(layers: Layers, xs: Sequence[Tensor]) -> list[Tensor]:
        return straight(layers[:num_run], xs)

    for script in (cut, straight, cut):
        model.compare(script)


def test_results_die_with_their_backward_unless_they_are_held(session: GraphSession) -> None:
    model = Model(session, poisons=True)
    first, second = model.chain.pairs
    hidden = model.callers[0](model.inputs(1)[0])
    out = model.callers[1](hidden)
    before = hidden.detach().clone()
    loss = out.sum()
    del out
    assert not second.outputs[0].isnan().any()
    loss.backward()
    assert torch.equal(hidden, before)
    assert is_poisoned(second.outputs[0])
    assert not first.outputs[0].isnan().any()


def test_nothing_dies_where_it_was_not_asked_for(session: GraphSession) -> None:
    model = Model(session)
    model.compare(straight)
    assert not any(pair.outputs[0].isnan().any() for pair in model.chain.pairs)


def test_an_alias_that_nobody_knows_of_shows_it(session: GraphSession, device: torch.device) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    pair = forward_pair(session, lambda x: x * 2, x, poisons=True)
    alias = pair.outputs[0].detach()  # It is there before callers are counted.
    backward_half(pair)
    call(pair, x).sum().backward()
    assert is_poisoned(alias)
    assert torch.equal(call(pair, x), x * 2)


@pytest.mark.parametrize("of", ["parameter", "buffer"])
def test_a_result_that_is_memory_of_the_model_stays(session: GraphSession, device: torch.device, of: str) -> None:
    norm = nn.BatchNorm1d(3).to(device).eval()
    owned = norm.weight if of == "parameter" else norm.running_var
    x = torch.ones(2, 3, device=device, requires_grad=True)
    pair = captured(session, lambda x: (norm(x), owned.detach().view(-1)), x, modules=[norm], poisons=True)
    call(pair, x)[0].sum().backward()
    assert torch.equal(owned, torch.ones_like(owned))
