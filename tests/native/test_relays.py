"""Layers in the hands of the compiled part: the same results, the same refusals, and nothing is left behind."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphstep
from graphstep.capture.chain_run import ChainRun
from graphstep.config import CudaGraphConfig, CudaGraphImpl
from graphstep.errors import LifecycleError, StaleAddressError
from graphstep.native.build import VARIABLE
from graphstep.native.interface import FastPath
from graphstep.strategies.manager import CudaGraphManager

NUM_LAYERS = 4


class Layer(nn.Module):
    """With a parameter, a buffer and an attribute that Python reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("shift", torch.linspace(0, 1, 8))
        self.scale = 0.5

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.linear(x) + self.shift) * self.scale * mask
        return x + y


class Model(nn.Module):
    """Some layers; what happens between them is for a test to say."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.between: Any = lambda index, x: x

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = self.between(index, layer(x, mask))
        return x


def attached(model: Model, merge: int) -> CudaGraphManager:
    """Graphs of the layers."""
    config = CudaGraphConfig(impl=CudaGraphImpl.local, merge_layers=merge)
    return graphstep.attach(model, config, regions={"layers.*": "layer"})


def steps(model: Model, num_steps: int, session: CudaGraphManager | None) -> list[Tensor]:
    """Losses and gradients of some steps on changing inputs."""
    found: list[Tensor] = []
    for number in range(num_steps):
        torch.manual_seed(number)
        x, mask = torch.randn(2, 8, requires_grad=True), torch.rand(2, 8).round()
        loss = model(x, mask).square().sum()
        loss.backward()
        assert x.grad is not None
        found += [loss.detach().clone(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
        if session is not None:
            session.end_step()
    return found


def equal(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    """Bit for bit."""
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


def relays(session: CudaGraphManager) -> Iterator[bool]:
    """For each chain of several layers, whether the compiled part has it."""
    chains = {chain for calls in session._regions.values() for chain, _ in calls.all_links()}
    return (chain.relay is not None for chain in chains if len(chain.pairs) > 1)


@pytest.mark.parametrize("merge", [1, 2, 0])
@pytest.mark.parametrize("choice", ["required", "off"])
def test_results_are_those_of_eager(fast: FastPath, monkeypatch: pytest.MonkeyPatch, choice: str, merge: int) -> None:
    del fast
    monkeypatch.setenv(VARIABLE, choice)
    expected = steps(Model(), 6, None)
    model = Model()
    with attached(model, merge) as session:
        assert equal(steps(model, 6, session), expected)
        assert all(found == (choice == "required") for found in relays(session))
        rows = session.report().rows
        assert [row.num_replays for row in rows] == [5] * NUM_LAYERS


def freeze(model: Model) -> None:
    model.layers[2].linear.bias.requires_grad_(False)


def scale(model: Model) -> None:
    model.layers[2].scale = 0.25


def evaluate(model: Model) -> None:
    model.layers[2].eval()


def hook(model: Model) -> None:
    model.layers[2].linear.weight.register_hook(lambda gradient: gradient * 2)


def written(model: Model) -> None:
    with torch.no_grad():
        model.layers[2].linear.weight.mul_(0.5)


@pytest.mark.parametrize("merge", [1, 0])
@pytest.mark.parametrize("change", [freeze, scale, evaluate, hook, written])
def test_what_changes_between_two_layers_is_seen(fast: FastPath, change: Any, merge: int) -> None:
    del fast

    def changed_once(model: Model) -> list[Tensor]:
        done: list[int] = []

        def between(index: int, x: Tensor) -> Tensor:
            if index == 1 and not done:
                done.append(index)
                change(model)
            return x

        model.between = between
        return steps(model, 3, None)

    reference = Model()
    steps(reference, 3, None)
    expected = changed_once(reference)
    model = Model()
    with attached(model, merge) as session:
        steps(model, 3, session)
        assert any(relays(session))
        assert equal(changed_once(model), expected)


@pytest.mark.parametrize("merge", [1, 0])
def test_other_tensors_between_two_layers_are_seen(fast: FastPath, merge: int) -> None:
    del fast
    expected_model, model = Model(), Model()
    with attached(model, merge) as session:
        steps(expected_model, 3, None)
        steps(model, 3, session)
        for each in (expected_model, model):
            each.between = lambda index, x: x * 1.5 if index == 1 else x
        assert equal(steps(model, 3, None), steps(expected_model, 3, None))
        for each in (expected_model, model):
            each.between = lambda index, x: x.mul_(1.5) if index == 1 else x
        mine, theirs = (_outcome(each) for each in (model, expected_model))
        assert mine == theirs or isinstance(mine, str)


def _outcome(model: Model) -> str | list[Any]:
    """What comes of writing into a result: the same as eagerly, or a refusal."""
    try:
        return [tensor.tolist() for tensor in steps(model, 1, None)]
    except (LifecycleError, RuntimeError) as error:
        return type(error).__name__


@pytest.mark.parametrize("choice", ["required", "off"])
@pytest.mark.parametrize("merge", [1, 2])
def test_a_weight_of_a_later_layer_with_other_strides_is_seen(
    fast: FastPath, monkeypatch: pytest.MonkeyPatch, merge: int, choice: str
) -> None:
    del fast
    monkeypatch.setenv(VARIABLE, choice)
    expected_model, model = Model(), Model()
    with attached(model, merge) as session:
        steps(expected_model, 3, None)
        steps(model, 3, session)
        for each in (expected_model, model):
            weight = each.layers[2].linear.weight
            weight.data = weight.data.t()
        expected = steps(expected_model, 1, None)
        with suppress(StaleAddressError):  # Refused, or run eagerly.
            assert equal(steps(model, 1, None), expected)


@pytest.mark.parametrize("ask", ["grad", "inputs"])
def test_a_second_pass_towards_parameters_is_refused(fast: FastPath, ask: str) -> None:
    del fast
    model = Model()
    with attached(model, 1) as session:
        steps(model, 3, session)
        shift = torch.zeros(8, requires_grad=True)
        loss = (model(torch.randn(2, 8), torch.ones(2, 8)) + shift).sum()
        loss.backward(retain_graph=True)
        weight = model.layers[1].linear.weight
        run = partial(torch.autograd.grad, loss, allow_unused=True) if ask == "grad" else loss.backward
        with pytest.raises(LifecycleError, match="has run already"):
            run(inputs=[weight, shift])


def test_the_last_node_of_a_backward_is_where_its_results_are(fast: FastPath) -> None:
    """The engine has whoever calls backward wait for the streams of such nodes only."""
    del fast
    model = Model()
    with attached(model, 1) as session:
        steps(model, 3, session)
        result = model.layers[0](torch.randn(2, 8, requires_grad=True), torch.ones(2, 8))
        landmarks = result.grad_fn.next_functions[-1][0]
        assert landmarks.name() == "Landmarks"
        (metadata,) = landmarks._input_metadata
        assert (metadata.device, tuple(metadata.shape)) == (result.device, (2, 8))


@pytest.mark.parametrize("merge", [1, 0])
def test_a_pass_that_is_given_up_leaves_nothing(fast: FastPath, merge: int) -> None:
    del fast
    model = Model()
    with attached(model, merge) as session:
        steps(model, 3, session)
        x, mask = torch.randn(2, 8, requires_grad=True), torch.ones(2, 8)
        for _ in range(3):
            y = model.layers[0](x, mask)
            z = model.layers[1](y, mask)
            reference = weakref.ref(z)
            del y, z
            assert reference() is None
            assert session._num_open == 0
        expected = steps(Model(), 6, None)[-1:]
        assert equal(steps(model, 6, session)[-1:], expected)


def test_an_error_in_a_launch_ends_the_pass(fast: FastPath, monkeypatch: pytest.MonkeyPatch) -> None:
    del fast
    model = Model()
    with attached(model, 1) as session:
        steps(model, 3, session)

        def fail() -> None:
            raise ValueError("in a hook")

        calls = list(session._regions.values())
        calls[2].manual_hook = fail
        x, mask = torch.randn(2, 8, requires_grad=True), torch.ones(2, 8)
        with pytest.raises(ValueError, match="in a hook"):
            model(x, mask)
        calls[2].manual_hook = None
        gc.collect()
        assert session._num_open == 0
        assert equal(steps(model, 3, session), steps(Model(), 3, None))


def test_models_are_collected(fast: FastPath) -> None:
    del fast
    model = Model()
    session = attached(model, 1)
    steps(model, 3, session)
    x, mask = torch.randn(2, 8, requires_grad=True), torch.ones(2, 8)
    held = model.layers[0](x, mask)
    references = [weakref.ref(each) for each in (model, session, held)]
    del model, session, held
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


def test_many_passes_leave_no_memory(fast: FastPath) -> None:
    del fast
    model = Model()
    with attached(model, 1) as session:
        steps(model, 5, session)
        gc.collect()
        before = len(gc.get_objects())
        steps(model, 40, session)
        gc.collect()
        assert len(gc.get_objects()) - before < 40


@pytest.mark.parametrize("loop", ["none", "zeros", "kept", "own"])
def test_gradients_go_where_the_loop_has_them(fast: FastPath, monkeypatch: pytest.MonkeyPatch, loop: str) -> None:
    del fast
    looked: list[int] = []
    settled: list[int] = []

    def gradients(model: Model, session: CudaGraphManager | None) -> list[Tensor]:
        found: list[Tensor] = []
        for number in range(6):
            torch.manual_seed(number)
            loss = model(torch.randn(2, 8, requires_grad=True), torch.ones(2, 8)).square().sum()
            loss.backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                found.append(parameter.grad if loop == "kept" else parameter.grad.clone())
                if loop == "own":
                    parameter.grad = torch.ones_like(parameter)
            if loop != "own":
                model.zero_grad(set_to_none=loop != "zeros")
            if session is not None:
                session.end_step()
        return found

    monkeypatch.setenv(VARIABLE, "required")
    launch, closer = ChainRun._launch_all, ChainRun.replayed_backward
    monkeypatch.setattr(ChainRun, "_launch_all", lambda run, given: settled.append(1) or launch(run, given))
    monkeypatch.setattr(ChainRun, "replayed_backward", lambda run, *given: looked.append(1) or closer(run, *given))
    model = Model()
    with attached(model, 1) as session:
        assert equal(gradients(model, session), gradients(Model(), None))
        assert sum(row.num_replays for row in session.report().rows) == 5 * NUM_LAYERS
    assert not looked, "the common case is left to the compiled part"
    assert len(settled) == {"zeros": 0, "own": 4}.get(loop, 5)  # Gradients are at home after the capture.


class Twice(nn.Module):
    """Returns one memory in two shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y: Tensor = torch.tanh(self.linear(x))
        return y.view(-1), y


def test_results_that_share_memory(fast: FastPath) -> None:
    del fast

    def losses(model: nn.Sequential, session: CudaGraphManager | None) -> list[Tensor]:
        found: list[Tensor] = []
        for number in range(5):
            torch.manual_seed(number)
            loss = _loss_of_two(*model(torch.randn(4, 8, requires_grad=True)))
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            model.zero_grad()
            if session is not None:
                session.end_step()
        return found

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Twice())
    reference = copy.deepcopy(model)
    config = CudaGraphConfig(impl=CudaGraphImpl.local)
    with graphstep.attach(model, config, regions={"*": "layer"}) as session:
        assert equal(losses(model, session), losses(reference, None))
        assert any(relays(session))
        assert [row.num_replays for row in session.report().rows] == [4, 4]


def _loss_of_two(flat: Tensor, square: Tensor) -> Tensor:
    return (square * 2 + flat.view_as(square)).sum()
