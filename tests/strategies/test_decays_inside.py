"""Weight decay before a step that is told of none, with the bits of the optimizer's own."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphstep.strategies.fused_decay import formula_of_kernel
from graphstep.strategies.optimizers_inside import OptimizersInside

RATES = (2.0**-6, 2.0**-6, 2.0**-4, 0.0, 2.0**-3, 2.0**-7)
DECAYS = (0.1, 0.03, 0.0, 0.3, 0.9, 0.001)
WAYS: dict[str, dict[str, Any]] = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}


def weights_of(dtype: torch.dtype, device: torch.device) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(size, generator=generator) * torch.logspace(-6, 2, size) for size in (513, 7)]
    made[0][:2] = torch.tensor([0.0, -0.0])
    return [nn.Parameter(each.to(device, dtype)) for each in made] + [nn.Parameter(torch.ones(3, device=device))]


def steps(kind: Any, way: str, dtype: torch.dtype, device: torch.device, *, is_inside: bool) -> list[Tensor]:
    """Each with another rate and decay; the last parameter has no gradient."""
    options = dict(WAYS[way])
    if kind is not torch.optim.AdamW:
        options["decoupled_weight_decay"] = True
    if way != "fused":
        options["capturable"] = True
    parameters = weights_of(dtype, device)
    optimizer = kind(parameters, lr=1.0, weight_decay=0.1, **options)
    inside = OptimizersInside([optimizer], device)
    generator, found = torch.Generator().manual_seed(1), []
    for rate, decay in zip(RATES, DECAYS, strict=True):
        optimizer.param_groups[0].update(lr=rate, weight_decay=decay)
        for parameter in parameters[:2]:
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(device, dtype)
        if is_inside:
            with inside.on_device():
                optimizer.step()
        else:
            optimizer.param_groups[0]["lr"] = torch.tensor(rate, device=device)
            optimizer.step()
        assert optimizer.param_groups[0]["weight_decay"] == decay
        found += [parameter.detach().clone() for parameter in parameters]
    return found


def same_bits(mine: Tensor, theirs: Tensor) -> bool:
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[mine.element_size()]
    return torch.equal(mine.view(kind), theirs.view(kind))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam])
def test_bits_are_those_of_the_optimizer(device: torch.device, kind: Any, dtype: torch.dtype, way: str) -> None:
    if way == "fused" and "fused" not in inspect.signature(kind).parameters:
        return
    if way != "fused" and device.type == "cpu":
        return  # torch has no capturable optimizers there.
    expected = steps(kind, way, dtype, device, is_inside=False)
    found = steps(kind, way, dtype, device, is_inside=True)
    assert all(map(same_bits, expected, found))


@pytest.mark.parametrize(
    ("dtype", "is_known"), [(torch.float32, True), (torch.float64, True), (torch.bfloat16, False)], ids=str
)
def test_the_formula_of_the_kernel_is_found(device: torch.device, dtype: torch.dtype, is_known: bool) -> None:
    """Half-precision weights are not rounded between decay and update: nothing before the kernel gives its bits."""
    assert (formula_of_kernel(dtype, device) is not None) is is_known


def adamw(**options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(weights_of(torch.float32, torch.device("cpu")), lr=2.0**-6, fused=True, **options)


def test_the_kernel_decays_until_the_number_changes() -> None:
    optimizer = adamw(weight_decay=0.1)
    inside = OptimizersInside([optimizer], torch.device("cpu"))
    seen: list[float] = []

    def run(decay: float) -> OptimizersInside:
        optimizer.param_groups[0]["weight_decay"] = decay
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        with inside.on_device():
            hook = optimizer.register_step_pre_hook(lambda each, *_: seen.append(each.param_groups[0]["weight_decay"]))
            optimizer.step()
            hook.remove()
        return inside.noted()

    first = run(0.1)
    assert seen == [0.1]
    optimizer.param_groups[0]["weight_decay"] = 0.2
    assert first.refresh() == ["weight_decay"]
    second = run(0.2)
    assert seen == [0.1, 0.0]
    for decay in (0.3, 0.0, 0.2):
        optimizer.param_groups[0]["weight_decay"] = decay
        assert second.refresh() == []
        number = next(iter(second._decays._numbers.values()))
        assert float(number) == decay
    optimizer.param_groups[0].update(weight_decay=0.5, betas=(0.8, 0.9))
    assert second.refresh() == ["betas"]


def test_a_closure_computes_gradients_before_the_decay() -> None:
    plain, graphed = adamw(weight_decay=0.5), adamw(weight_decay=0.5)
    inside = OptimizersInside([graphed], torch.device("cpu"))
    for decay in (0.5, 0.25, 0.125):
        for optimizer in (plain, graphed):
            optimizer.param_groups[0]["weight_decay"] = decay

            def closure(optimizer: torch.optim.AdamW = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = sum((p.square().sum() for p in optimizer.param_groups[0]["params"]), torch.zeros(()))
                loss.backward()
                return loss.detach()

            if optimizer is plain:
                optimizer.step(closure)
            else:
                with inside.on_device():
                    optimizer.step(closure)
    for mine, theirs in zip(graphed.param_groups[0]["params"], plain.param_groups[0]["params"], strict=True):
        assert torch.equal(mine, theirs)


def test_an_overflow_leaves_the_weights_as_they_are() -> None:
    optimizer = adamw(weight_decay=0.5)
    inside = OptimizersInside([optimizer], torch.device("cpu"))
    before = [parameter.detach().clone() for parameter in optimizer.param_groups[0]["params"]]
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(1.0), torch.tensor(1.0)
    for decay in (0.5, 0.25, 0.125):
        optimizer.param_groups[0]["weight_decay"] = decay
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad = torch.full_like(parameter, torch.inf)
        with inside.on_device():
            optimizer.step()
    assert all(map(same_bits, [p.detach() for p in optimizer.param_groups[0]["params"]], before))


def test_a_step_that_fails_leaves_the_numbers_and_hooks_of_the_user() -> None:
    optimizer = adamw(weight_decay=0.5)
    inside = OptimizersInside([optimizer], torch.device("cpu"))
    for decay in (0.5, 0.25):
        optimizer.param_groups[0]["weight_decay"] = decay
        optimizer.param_groups[0]["params"][0].grad = torch.ones(513)
        optimizer.param_groups[0]["eps"] = "none"
        with pytest.raises((TypeError, RuntimeError)), inside.on_device():
            optimizer.step()
        assert optimizer.param_groups[0]["weight_decay"] == decay
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
