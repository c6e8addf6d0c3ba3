"""Weight decay that optimizers add to gradients: added before the step, with the bits of the optimizer's own."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from tests.strategies.test_decays_inside import same_bits
from torch import Tensor, nn

from graphstep.strategies.added_decay import type_of_number
from graphstep.strategies.optimizers_inside import OptimizersInside

CPU = torch.device("cpu")
DECAYS = (0.1, 0.03, 0.03, 0.3, 0.9, 0.001)
SINGLE: tuple[Any, ...] = (
    torch.optim.Adam,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.ASGD,
    torch.optim.RMSprop,
)
KINDS_OF_STEPS = [
    (kind, foreach)
    for kind in SINGLE
    for foreach in (False, True, None)
    if foreach or kind is not torch.optim.RMSprop  # Without, it reads a rate in a tensor back.
]
FUSED: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {}),
    "Adam, amsgrad": (torch.optim.Adam, {"amsgrad": True}),
    "Adam, maximize": (torch.optim.Adam, {"maximize": True}),
    "SGD": (torch.optim.SGD, {}),
    "SGD, momentum": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.25}),
    "SGD, nesterov, maximize": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
    "Adagrad": (torch.optim.Adagrad, {"lr_decay": 0.01}),
}


@pytest.fixture
def _capturable_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks for a GPU where a step is told to be capturable; the operations are there on the CPU too."""
    for kind in SINGLE:
        module = importlib.import_module(kind.__module__)
        monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda **_: ["cpu", "cuda"])


def weights_of(dtype: torch.dtype, device: torch.device) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(size, generator=generator) * torch.logspace(-6, 2, size) for size in (513, 7)]
    made[0][:2] = torch.tensor([0.0, -0.0])
    return [nn.Parameter(each.to(device, dtype)) for each in made] + [nn.Parameter(torch.ones(3, device=device))]


def steps(
    kind: Any, dtype: torch.dtype, device: torch.device, options: dict[str, Any], *, is_inside: bool
) -> list[Tensor]:
    """Each with another rate and decay; the last parameter has no gradient. Weights, gradients and state."""
    parameters = weights_of(dtype, device)
    optimizer = kind(parameters, lr=torch.tensor(1.0, device=device), weight_decay=0.1, **options)
    inside = OptimizersInside([optimizer], device)
    seen: list[float] = []
    generator, found = torch.Generator().manual_seed(1), []
    for index, decay in enumerate(DECAYS):
        rate = 2.0 ** -(index + 3)
        optimizer.param_groups[0].update(lr=torch.tensor(rate, device=device), weight_decay=decay)
        for parameter in parameters[:2]:
            gradient = torch.randn(parameter.shape, generator=generator)
            gradient[-1] = -0.0
            parameter.grad = gradient.to(device, dtype)
        if is_inside:
            gradients = [parameter.grad for parameter in parameters]
            with inside.on_device():
                hook = optimizer.register_step_pre_hook(lambda o, *_: seen.append(o.param_groups[0]["weight_decay"]))
                optimizer.step()
                hook.remove()
            assert all(p.grad is gradient for p, gradient in zip(parameters, gradients, strict=True))
        else:
            optimizer.step()
        assert optimizer.param_groups[0]["weight_decay"] == decay
        found += [each.detach().clone() for p in parameters for each in (p, p.grad) if each is not None]
        found += [v.clone() for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    if is_inside:
        name, group = kind.__name__, optimizer.param_groups[0]
        # Kernels of Adam on a GPU may round some elements of a vector otherwise than others.
        is_adam_there = kind is torch.optim.Adam and group["fused"] and device.type == "cuda"
        may_be_unknown = dtype == torch.bfloat16 or is_adam_there
        is_known = not may_be_unknown or type_of_number(name, group, dtype, device) is not None
        told = [0.0] * len(DECAYS) if is_known else [*DECAYS]
        assert seen == [0.1, *told[1:]], "the step is told of none once it has changed"
    return found


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bits_are_those_of_the_kernel(device: torch.device, name: str, dtype: torch.dtype) -> None:
    kind, options = FUSED[name]
    if kind is torch.optim.Adagrad and device.type == "cuda":
        pytest.skip("torch has this kernel for the CPU only")
    options = {"fused": True, **options}
    expected = steps(kind, dtype, device, options, is_inside=False)
    found = steps(kind, dtype, device, options, is_inside=True)
    assert all(map(same_bits, expected, found))


@pytest.mark.usefixtures("_capturable_anywhere")
@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("kind", "foreach"), KINDS_OF_STEPS)
def test_bits_are_those_of_single_operations(
    device: torch.device, kind: Any, dtype: torch.dtype, foreach: bool | None, maximize: bool
) -> None:
    options = {"capturable": True, "foreach": foreach, "maximize": maximize}
    expected = steps(kind, dtype, device, options, is_inside=False)
    found = steps(kind, dtype, device, options, is_inside=True)
    assert all(map(same_bits, expected, found))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_kernels_of_half_precision_are_left_alone(device: torch.device, name: str, dtype: torch.dtype) -> None:
    """They do not round between decay and update: no gradient of half precision gives their bits."""
    assert type_of_number(name, {"fused": True}, dtype, device) is None


def run(optimizer: torch.optim.Optimizer, inside: OptimizersInside, decay: float) -> OptimizersInside:
    optimizer.param_groups[0]["weight_decay"] = decay
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    with inside.on_device():
        optimizer.step()
    return inside.noted()


def test_a_decay_of_zero_is_another_graph() -> None:
    """A product with it would change the sign of a gradient of -0.0, or make a NaN of an infinite weight."""
    optimizer = torch.optim.SGD(weights_of(torch.float32, CPU), lr=2.0**-6, weight_decay=0.1, fused=True)
    inside = OptimizersInside([optimizer], CPU)
    run(optimizer, inside, 0.1)
    noted = run(optimizer, inside, 0.2)
    for decay, changed in ((0.3, []), (0.0, ["weight_decay"]), (0.4, [])):
        optimizer.param_groups[0]["weight_decay"] = decay
        assert noted.refresh() == changed
    noted = run(optimizer, inside, 0.0)
    optimizer.param_groups[0]["weight_decay"] = 0.1
    assert noted.refresh() == ["weight_decay"]


def test_gradients_that_the_kernel_unscales_are_left_to_it() -> None:
    optimizer = torch.optim.Adam(weights_of(torch.float32, CPU), lr=2.0**-6, weight_decay=0.1, fused=True)
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    inside = OptimizersInside([optimizer], CPU)
    for decay in (0.1, 0.2):
        noted = run(optimizer, inside, decay)
    assert optimizer.param_groups[0]["params"][0].grad[0] == 1 / 8, "as the kernel leaves it"
    optimizer.param_groups[0]["weight_decay"] = 0.3
    assert noted.refresh() == ["weight_decay"]


@pytest.mark.parametrize("name", ["Adam", "SGD, momentum"])
def test_an_overflow_leaves_all_as_it_is(device: torch.device, name: str) -> None:
    kind, options = FUSED[name]
    optimizer = kind(weights_of(torch.float32, device), lr=2.0**-6, weight_decay=0.1, fused=True, **options)
    inside = OptimizersInside([optimizer], device)
    run(optimizer, inside, 0.1)
    parameters, states = optimizer.param_groups[0]["params"], optimizer.state
    before = [p.detach().clone() for p in parameters]
    state_before = [value.clone() for state in states.values() for value in state.values()]
    optimizer.found_inf = torch.tensor(1.0, device=device)
    for decay in (0.2, 0.3):
        optimizer.param_groups[0]["weight_decay"] = decay
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, torch.inf)
        with inside.on_device():
            optimizer.step()
    assert all(map(same_bits, [p.detach() for p in parameters], before))
    assert all(map(torch.equal, [v for state in states.values() for v in state.values()], state_before))


def test_a_step_that_fails_leaves_the_gradients_of_the_user() -> None:
    optimizer = torch.optim.SGD(weights_of(torch.float32, CPU), lr=2.0**-6, weight_decay=0.1, fused=True)
    inside = OptimizersInside([optimizer], CPU)
    run(optimizer, inside, 0.1)
    gradients = [parameter.grad for parameter in optimizer.param_groups[0]["params"]]
    optimizer.param_groups[0].update(weight_decay=0.2, momentum="none")
    with pytest.raises((TypeError, RuntimeError)), inside.on_device():
        optimizer.step()
    assert all(p.grad is g for p, g in zip(optimizer.param_groups[0]["params"], gradients, strict=True))
    assert optimizer.param_groups[0]["weight_decay"] == 0.2


def test_subclasses_are_left_alone() -> None:
    class Own(torch.optim.SGD):
        """Its step may be another."""

    optimizer = Own(weights_of(torch.float32, CPU), lr=2.0**-6, weight_decay=0.1, fused=True)
    inside = OptimizersInside([optimizer], CPU)
    for decay in (0.1, 0.2):
        noted = run(optimizer, inside, decay)
    optimizer.param_groups[0]["weight_decay"] = 0.3
    assert noted.refresh() == ["weight_decay"]
