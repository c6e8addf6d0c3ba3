"""An observed run leaves no trace, also when it fails, and tells what it touched."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from graphstep.capture.observe import training_flags_kept
from graphstep.capture.session import GraphSession
from graphstep.engine import torch_private
from graphstep.errors import CaptureError


class Counting(nn.Module):
    """State of every kind that a forward may change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("slots", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.slots[2:4].add_(1.0)
        self.slots.view(2, 4)[0].copy_(torch.rand(4, device=x.device))
        return self.norm(nn.functional.dropout(self.linear(x), 0.5))


def rng(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def state(model: nn.Module) -> dict[str, Tensor]:
    values = {name: value.detach().clone() for name, value in model.state_dict().items()}
    grads = {f"{n}.grad": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {**values, **grads}


def assert_same(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def step(model: nn.Module, x: Tensor) -> Callable[[], Any]:
    return lambda: model(x).square().sum().backward()


class StopError(Exception):
    pass


@pytest.mark.parametrize("num_runs", [1, 3])
@pytest.mark.parametrize("gradients", ["none", "existing", "mixed"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_run_leaves_no_trace(
    session: GraphSession, device: torch.device, num_runs: int, gradients: str, fails: bool
) -> None:
    model = Counting().to(device)
    x = torch.randn(6, 4, device=device)
    if gradients != "none":
        step(model, x)()
    if gradients == "mixed":
        model.linear.bias.grad = None
    before, states = state(model), rng(device)
    objects = {name: parameter.grad for name, parameter in model.named_parameters()}
    addresses = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    runs: list[int] = []

    def function() -> None:
        step(model, x)()
        runs.append(1)
        if fails and len(runs) == num_runs:
            raise StopError

    if fails:
        with pytest.raises(StopError):
            session.observe(function, num_runs=num_runs)
    else:
        session.observe(function, num_runs=num_runs)
    assert len(runs) == num_runs
    assert_same(state(model), before)
    assert all(parameter.grad is objects[name] for name, parameter in model.named_parameters())
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == addresses
    assert all(torch.equal(a, b) for a, b in zip(rng(device), states, strict=True))
    assert model.training


def test_training_goes_on_as_if_nothing_had_happened(session: GraphSession, device: torch.device) -> None:
    x = torch.randn(6, 4, device=device)
    traces = []
    for observes in (False, True):
        torch.manual_seed(5)
        model = Counting().to(device)
        step(model, x)()
        if observes:
            session.observe(step(model, x), num_runs=2)
        step(model, x)()
        traces.append(state(model))
    assert_same(*traces)


def test_a_named_generator_is_put_back(session: GraphSession, device: torch.device) -> None:
    generator = torch.Generator(device).manual_seed(3)
    before = generator.get_state()

    def function() -> None:
        for _ in range(2):
            torch.randn(4, generator=generator, device=device)

    observation = session.observe(function, num_runs=2)
    assert torch.equal(generator.get_state(), before)
    (found,) = observation.generators  # another object may stand for the same generator
    generator.manual_seed(4)
    assert torch.equal(found.get_state(), generator.get_state())


def test_generators_of_the_host_are_put_back(session: GraphSession) -> None:
    mine, numpys = random.getstate(), np.random.get_state()[1].tolist()
    session.observe(lambda: (random.random(), np.random.rand()))
    assert random.getstate() == mine
    assert np.random.get_state()[1].tolist() == numpys


def test_versions_of_unchanged_tensors_stay(session: GraphSession, device: torch.device) -> None:
    model = nn.Linear(3, 3).to(device)
    versions = [parameter._version for parameter in model.parameters()]
    session.observe(lambda: model(torch.randn(2, 3, device=device)).sum().backward())
    assert [parameter._version for parameter in model.parameters()] == versions


def test_leaves_are_those_that_backward_fills(session: GraphSession, device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(device)
    model[0].weight.requires_grad_(False)
    unused = nn.Parameter(torch.ones(3, device=device))

    def function() -> None:
        (model(torch.randn(2, 3, device=device)) + (unused * 2).detach()).sum().backward()

    observation = session.observe(function)
    expected = [model[0].bias, model[1].weight, model[1].bias]
    assert {id(leaf) for leaf in observation.leaves} == {id(parameter) for parameter in expected}


def test_what_is_read_stays_alive(session: GraphSession, device: torch.device) -> None:
    constant = torch.arange(4.0, device=device)
    observation = session.observe(lambda: constant * 2)
    addresses = {external.data_ptr() for external in observation.externals}
    assert constant.data_ptr() in addresses


def test_a_real_run_under_watch_counts(session: GraphSession, device: torch.device) -> None:
    model = Counting().to(device)
    x = torch.randn(6, 4, device=device)
    result, observation = session.watch_run(step(model, x))
    assert result is None
    assert int(model.calls) == 1
    assert {id(leaf) for leaf in observation.leaves} >= {id(model.linear.weight), id(model.linear.bias)}


def test_a_real_run_under_watch_holds_nothing_that_it_lets_go_of(session: GraphSession, device: torch.device) -> None:
    """Compiled code makes its tensors past the dispatcher: they seem to have been there before."""
    constant = torch.ones(64, device=device)
    old = [torch.ones(64, device=device)]
    was_gone: list[bool] = []

    def function() -> None:
        with _disable_current_modes():
            made = torch.zeros(64, device=device)
        torch.add(constant, old[0], out=made)
        storages = [torch_private.WeakStorage(made), torch_private.WeakStorage(old.pop())]
        del made
        was_gone.extend(storage.is_gone() for storage in storages)

    old_key = torch_private.storage_key(old[0])
    _, observation = session.watch_run(function)
    assert was_gone == [True, True]
    assert list(map(torch_private.storage_key, observation.externals)) == [torch_private.storage_key(constant)]
    assert len(observation.used()) == 3
    assert old_key in observation.used()


def test_what_nobody_else_holds_can_be_let_go_of_after_an_undone_run(
    session: GraphSession, device: torch.device
) -> None:
    constant, old = torch.ones(4, device=device), [torch.ones(4, device=device)]
    observation = session.observe(lambda: constant + old.pop())
    assert len(observation.externals) == 2
    observation.forget_unheld()
    assert list(map(torch_private.storage_key, observation.externals)) == [torch_private.storage_key(constant)]
    assert [source() is constant for source in observation.sources] == [True]


def test_what_outlives_a_real_run_is_held(session: GraphSession, device: torch.device) -> None:
    constants = [torch.arange(4.0, device=device)]
    _, observation = session.watch_run(lambda: constants[0] * 2)
    storage = torch_private.WeakStorage(constants.pop())
    assert not storage.is_gone()
    del observation
    assert storage.is_gone()


def test_training_flags_are_kept_module_by_module() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    model[1][0].eval()
    flags = [module.training for module in model.modules()]

    def change() -> None:
        with training_flags_kept(tuple(model.modules())):
            model.eval()
            raise StopError

    with pytest.raises(StopError):
        change()
    assert [module.training for module in model.modules()] == flags


@pytest.mark.parametrize(
    "change", [lambda t: t.set_(torch.zeros_like(t)), lambda t: t.resize_(8)], ids=["set", "resize"]
)
def test_other_memory_for_a_tensor_from_outside_is_refused(
    session: GraphSession, change: Callable[[Tensor], Tensor]
) -> None:
    """A GPU would capture it, and no replay would do it again."""
    tensor = torch.ones(4, device=session.device)
    address = tensor.data_ptr()
    with pytest.raises(CaptureError, match="replaces or resizes the storage"):
        session.observe(lambda: change(tensor))
    assert tensor.data_ptr() == address
    assert tensor.tolist() == [1.0] * 4
    session.observe(lambda: torch.empty(0, device=session.device).resize_(4))
