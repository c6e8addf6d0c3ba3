"""Hooks of modules and parameters fire as they do eagerly, and see the same values."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.models import HIDDEN, Decoder, in_order
from tests.strategies.runs import Run, compared
from torch import Tensor, nn

from graphstep.errors import LifecycleError

LOCAL = "local"
WITH_DROPOUT = partial(Decoder, dropout=0.2)
Log = list[tuple[str, float]]


def logs(device: torch.device, install: Any, **options: Any) -> tuple[Log, Log]:
    """What hooks saw in an eager and in a graphed run; ``install(model, log)`` installs them."""
    found: list[Log] = []

    def script(run: Run) -> None:
        log: Log = []
        found.append(log)
        install(run.model, log)
        for _ in range(4):
            run.step(2)

    compared(device, LOCAL, script, build=WITH_DROPOUT, **options)
    eager, graphed = found
    assert eager
    return eager, graphed


def value(tensor: Tensor) -> float:
    return float(tensor.detach().sum())


def module_hooks(model: Decoder, log: Log) -> None:
    for index, layer in enumerate(model.layers):
        layer.register_forward_pre_hook(lambda m, args, i=index: log.append((f"pre {i}", value(args[0]))))
        layer.register_forward_hook(lambda m, args, out, i=index: log.append((f"post {i}", value(out))))
        layer.register_full_backward_hook(lambda m, gi, go, i=index: log.append((f"back {i}", value(gi[0]))))
        layer.register_full_backward_pre_hook(lambda m, go, i=index: log.append((f"before {i}", value(go[0]))))


def hooks_that_change_values(model: Decoder, log: Log) -> None:
    layer = model.layers[1]
    layer.register_forward_pre_hook(lambda m, args: (args[0] * 1.5,))
    layer.register_forward_hook(lambda m, args, out: out * 0.5)
    layer.register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,))
    layer.register_forward_hook(lambda m, args, out: log.append(("seen", value(out))))


def parameter_hooks(model: Decoder, log: Log) -> None:
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda g, name=name: log.append((name, value(g))))


def changing_parameter_hooks(model: Decoder, log: Log) -> None:
    model.layers[0].mix.query.weight.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
    model.layers[1].mlp[1].bias.register_hook(lambda g: log.append(("bias", value(g))))


def accumulation_hooks(model: Decoder, log: Log) -> None:
    def note(parameter: Tensor, name: str) -> None:
        gradient = parameter.grad if parameter.grad is not None else parameter.main_grad  # type: ignore[attr-defined]
        log.append((name, value(gradient)))

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(note, name=name))


def tensor_hooks(model: Decoder, log: Log) -> None:
    for index, layer in enumerate(model.layers):

        def watch(_module: nn.Module, _inputs: Any, output: Tensor, index: int = index) -> None:
            if output.requires_grad:
                output.register_hook(lambda g: log.append((f"gradient {index}", value(g))))

        layer.register_forward_hook(watch)


def test_hooks_inside_a_region_that_come_and_go(device: torch.device) -> None:
    """What they compute is replayed; where they changed, the region runs eagerly."""

    def script(run: Run) -> None:
        first = run.model.layers[0].mlp.register_forward_hook(lambda module, inputs, output: output * 0.5)
        for step in range(8):
            if step == 3:
                second = run.model.layers[1].mix.register_forward_hook(lambda module, inputs, output: output * 2)
            if step == 5:
                second.remove()
            if step == 6:
                first.remove()
            run.step(1)

    run = compared(device, LOCAL, script, build=WITH_DROPOUT)
    assert run.num_replays == 2 * 2 + 2 * 1 + 1 * 2 + 2 * 1


INSTALLS = [module_hooks, hooks_that_change_values, parameter_hooks, changing_parameter_hooks, tensor_hooks]


@pytest.mark.parametrize("install", INSTALLS, ids=lambda install: install.__name__)
@pytest.mark.parametrize("modules", [(), ("attn",)], ids=["layers", "attn"])
def test_hooks_fire_as_eagerly(device: torch.device, install: Any, modules: Any) -> None:
    eager, graphed = logs(device, install, modules=modules)
    assert sorted(eager) == sorted(graphed)


@pytest.mark.parametrize("install", INSTALLS, ids=lambda install: install.__name__)
def test_hooks_with_several_microbatches_in_flight(device: torch.device, install: Any) -> None:
    eager, graphed = logs(device, install, forward_backward=in_order("ffbb"))
    assert sorted(eager) == sorted(graphed)


@pytest.mark.parametrize("zero", ["zeros", "none", "buffers"])
def test_hooks_after_accumulation_fire_once_a_backward(device: torch.device, zero: str) -> None:
    eager, graphed = logs(device, accumulation_hooks, zero=zero)
    assert sorted(eager) == sorted(graphed)


class Fused:
    """Steps each parameter as soon as its gradient is there."""

    def __init__(self, model: nn.Module) -> None:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.step)

    @torch.no_grad()
    def step(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            parameter.add_(parameter.grad, alpha=-0.05)
            parameter.grad = None


def test_an_optimizer_in_the_backward_pass(device: torch.device) -> None:
    def script(run: Run) -> None:
        Fused(run.model)
        for _ in range(4):
            run.step(2, optimize=False)

    assert compared(device, LOCAL, script, build=WITH_DROPOUT).num_replays == 2 * 3 * 2


def test_gradients_outside_the_layers_are_untouched(device: torch.device) -> None:
    """The embedding is tied to the head; both run eagerly around the replays."""
    run = compared(device, LOCAL, lambda run: [run.step(3) for _ in range(4)], build=WITH_DROPOUT)
    assert run.trace[-1]["embedding.weight.grad"].any()


class Probe(Decoder):
    """Keeps the gradients of the tensors between its layers."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.between: list[Tensor] = []

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x.retain_grad()
            self.between.append(x)
            x = layer(x)
        return x.square().mean()


def test_gradients_of_inner_tensors_can_be_kept(device: torch.device) -> None:
    kept: list[list[Tensor]] = []

    def script(run: Run) -> None:
        gradients: list[Tensor] = []
        kept.append(gradients)
        for _ in range(4):
            run.step(2)
            gradients.extend(x.grad for x in run.model.between)
            run.model.between.clear()

    run = compared(device, LOCAL, script, build=Probe)
    # `between` holds the first layer's result until the step ends: the second microbatch gets a slot of its own.
    assert run.num_replays == 2 + 2 + 4
    reasons = {"an earlier result is still held": 2, "the place of its argument is in use": 2}
    assert run.reasons() == {"observed": 4, **reasons}
    assert all(map(torch.equal, *kept))
    assert len(kept[0]) == 4 * 2 * 2


def keep_from_module_hooks(model: Decoder, kept: list[Tensor]) -> None:
    for layer in model.layers:
        layer.register_full_backward_hook(lambda m, grad_in, grad_out: kept.extend([grad_in[0], grad_out[0]]))


def keep_from_tensor_hooks(model: Decoder, kept: list[Tensor]) -> None:
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda m, args: args[0].register_hook(kept.append) and None)


def keep_from_parameter_hooks(model: Decoder, kept: list[Tensor]) -> None:
    for parameter in model.layers.parameters():
        parameter.register_hook(kept.append)


@pytest.mark.parametrize("install", [keep_from_module_hooks, keep_from_tensor_hooks, keep_from_parameter_hooks])
@pytest.mark.parametrize("order", ["fbfb", "ffbb"])
def test_gradients_that_hooks_keep_do_not_change(device: torch.device, install: Any, order: str) -> None:
    found: list[list[Tensor]] = []

    def script(run: Run) -> None:
        kept: list[Tensor] = []
        found.append(kept)
        install(run.model, kept)
        for _ in range(4):
            run.step(2)

    run = compared(device, LOCAL, script, build=WITH_DROPOUT, forward_backward=in_order(order))
    assert run.num_replays > 0
    sums = [sorted(value(tensor) for tensor in kept) for kept in found]
    assert sums[0] == sums[1]


@pytest.mark.parametrize("how", ["grad", "inputs"])
def test_gradients_of_chosen_tensors_are_refused(device: torch.device, how: str) -> None:
    """They must not add to the gradients of parameters, which a captured backward does."""
    run = Run(device, LOCAL)
    run.step(1)
    x = torch.randn(2, 6, HIDDEN, device=device, requires_grad=True)
    hidden = x * 2
    before = run.model.layers[0].mix.out.weight.grad.clone()
    loss = run.model.layers[0](hidden).square().sum()
    with pytest.raises(LifecycleError, match="chosen tensors") as caught:
        torch.autograd.grad(loss, hidden) if how == "grad" else loss.backward(inputs=[x])
    assert caught.value.where == "layers.0"
    assert torch.equal(run.model.layers[0].mix.out.weight.grad, before)
    run.strategy.close()
