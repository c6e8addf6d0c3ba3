"""What autograd sees of a run in the hands of the compiled part: who is visited, refused, told, and let go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.native.test_relays import equal
from torch import Tensor, nn

import graphstep
from graphstep.capture.chain_run import ChainRun
from graphstep.config import CudaGraphConfig, CudaGraphImpl
from graphstep.errors import LifecycleError
from graphstep.native.build import VARIABLE
from graphstep.native.interface import FastPath
from graphstep.strategies.manager import CudaGraphManager

NUM_LAYERS = 3
Loss = Callable[[nn.Sequential, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def compiled(fast: FastPath, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of these need it."""
    del fast
    monkeypatch.setenv(VARIABLE, "required")


def stack() -> nn.Sequential:
    """Some layers with weights of their own."""
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(NUM_LAYERS)))


def attached(model: nn.Module, merge: int = 1) -> CudaGraphManager:
    """Graphs of the layers."""
    config = CudaGraphConfig(impl=CudaGraphImpl.local, merge_layers=merge)
    return graphstep.attach(model, config, regions={"*": "layer"})


def plain(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    """Of the results."""
    del model, x
    return y.square().sum()


def step(model: nn.Sequential, number: int, loss: Loss = plain) -> list[Tensor]:
    """Gradients of one step."""
    torch.manual_seed(number)
    x = torch.randn(2, 8, requires_grad=True)
    loss(model, x, model(x)).backward()
    found = [each.grad.clone() for each in (x, *model.parameters()) if each.grad is not None]
    model.zero_grad(set_to_none=False)
    return found


def warm(model: nn.Sequential, session: CudaGraphManager) -> None:
    """Have it captured, and replayed."""
    for number in range(3):
        step(model, number)
        session.end_step()


def num_visits(profiler: torch.profiler.profile, name: str) -> int:
    """How often autograd has come to nodes of this name."""
    events = [event.name for event in profiler.events() or ()]
    return sum("evaluate_function" in event and name in event for event in events)


def decayed(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    """Weights that layers use are used by others as well."""
    del x
    return y.square().sum() + sum((p.square().sum() for p in model.parameters()), torch.zeros(()))


def decayed_first(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    """The same in the other order."""
    del x
    return sum((p.square().sum() for p in model.parameters()), torch.zeros(())) + y.square().sum()


def twice(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
    """Two passes in one backward."""
    return y.square().sum() + model(x * 2).sum()


@pytest.mark.parametrize("merge", [1, 0])
@pytest.mark.parametrize("loss", [decayed, decayed_first, twice])
def test_parameters_that_others_use_as_well(loss: Loss, merge: int) -> None:
    model, reference = stack(), stack()
    with attached(model, merge) as session:
        warm(model, session)
        for number in range(4):
            assert equal(step(model, number, loss), step(reference, number, loss))
            assert equal(step(model, number), step(reference, number))
            session.end_step()


def test_landmarks_that_nobody_else_has_are_not_visited() -> None:
    model = stack()
    with attached(model) as session:
        warm(model, session)
        y = model(torch.randn(2, 8, requires_grad=True))
        assert y.grad_fn is not None
        assert len(y.grad_fn.next_functions) == 2, "the input, and what stands before the landmarks"
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            y.sum().backward()
        assert num_visits(profiler, "AccumulateGrad") == 1, "that of the input"
        assert num_visits(profiler, "Landmarks") == 1
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            step(model, 3, decayed)
        assert num_visits(profiler, "AccumulateGrad") == 1 + 2 * NUM_LAYERS


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_passes_towards_parameters_alone_are_refused(layer: int) -> None:
    model = stack()
    with attached(model) as session:
        warm(model, session)
        x = torch.randn(2, 8, requires_grad=True)
        wanted = list(model[layer].parameters())
        with pytest.raises(LifecycleError, match="gradients of chosen tensors"):
            model(x).sum().backward(inputs=wanted)
        with pytest.raises(LifecycleError, match="gradients of chosen tensors"):
            torch.autograd.grad(model(x).sum(), wanted, allow_unused=True)
        assert equal(step(model, 9), step(stack(), 9))


def test_second_backwards_and_second_derivatives_are_refused() -> None:
    model = stack()
    with attached(model) as session:
        warm(model, session)
        loss = model(torch.randn(2, 8, requires_grad=True)).square().sum()
        loss.backward(retain_graph=True)
        with pytest.raises(LifecycleError, match="has run already"):
            loss.backward()
        with pytest.raises(LifecycleError, match="differentiated again"):
            model(torch.randn(2, 8, requires_grad=True)).square().sum().backward(create_graph=True)
        model.zero_grad(set_to_none=False)
        assert equal(step(model, 9), step(stack(), 9))


def test_an_error_of_a_backward_reaches_the_caller_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = stack()
    with attached(model) as session:
        warm(model, session)

        def fail(_run: ChainRun) -> None:
            raise KeyError("closing")

        with monkeypatch.context() as patch:
            patch.setattr(ChainRun, "close", fail)
            y = model(torch.randn(2, 8, requires_grad=True))
            with pytest.raises(KeyError, match="closing"):
                y.sum().backward()
        del y
        gc.collect()
        model.zero_grad(set_to_none=False)
        assert equal(step(model, 9), step(stack(), 9))
        assert session._num_open == 0


def test_hooks_on_results_and_on_their_node() -> None:
    seen: list[tuple[str, float]] = []

    def hooked(model: nn.Sequential, x: Tensor, y: Tensor) -> Tensor:
        del model, x
        y.register_hook(lambda gradient: gradient * 2)
        y.retain_grad()
        assert y.grad_fn is not None
        y.grad_fn.register_prehook(
            lambda given: seen.append(("before", sum(g.sum().item() for g in given if g is not None)))
        )
        return y.square().sum()

    model, reference = stack(), stack()
    with attached(model) as session:
        warm(model, session)
        mine = step(model, 5, hooked)
        of_replay = list(seen)
        assert equal(mine, step(reference, 5, hooked))
        assert of_replay == seen[len(of_replay) :]


def test_anomaly_mode() -> None:
    model = stack()
    with attached(model) as session:
        warm(model, session)
        with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
            assert equal(step(model, 4), step(stack(), 4))


@pytest.mark.parametrize("held", ["result", "node"])
def test_what_is_held_keeps_a_run_in_flight_and_no_longer(held: str) -> None:
    model = stack()
    with attached(model) as session:
        warm(model, session)
        y: Any = model(torch.randn(2, 8, requires_grad=True))
        kept: Any = y if held == "result" else y.grad_fn
        gone = weakref.ref(y)
        del y
        assert session._num_open == 1
        del kept
        gc.collect()
        assert gone() is None
        assert session._num_open == 0
