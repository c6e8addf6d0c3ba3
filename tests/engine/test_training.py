"""Training steps, captured whole: forward, backward, gradients accumulated in place, optimizers."""

from __future__ import annotations

import pytest
import torch
from tests.engine.programs import Build, Program, assert_replays_equal_eager
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from graphstep.engine import Engine


def network(device: torch.device, *, dropout: float = 0.0) -> nn.Module:
    model = nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 8, bias=False), nn.Linear(8, 4)
    ).to(device)
    zero_gradients(model)
    return model


def zero_gradients(model: nn.Module) -> list[Tensor]:
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return gradients(model)


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def accumulation(device: torch.device) -> Program:
    """Two microbatches are added to what is there; nothing is zeroed between replays."""
    model, x, y = network(device), torch.randn(5, 6, device=device), torch.randn(5, 4, device=device)

    def run() -> Tensor:
        losses = [functional.mse_loss(model(part), y) / 2 for part in (x, x.flip(0))]
        for loss in losses:
            loss.backward()
        return torch.stack(losses).detach()

    return Program(run, [x, y], gradients(model))


def zeroed_inside(device: torch.device) -> Program:
    model, x = network(device, dropout=0.5), torch.randn(5, 6, device=device)

    def run() -> Tensor:
        for gradient in gradients(model):
            gradient.zero_()
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return Program(run, [x], gradients(model))


def gradient_of_input(device: torch.device) -> Program:
    x = torch.randn(3, 4, device=device, requires_grad=True)
    x.grad = torch.zeros_like(x)

    def run() -> None:
        (x.sin() * x.exp()).sum().backward()

    return Program(run, [x], [x.grad])


def gradient_returned(device: torch.device) -> Program:
    x = torch.randn(3, 4, device=device)

    def run() -> tuple[Tensor, ...]:
        leaf = x.detach().requires_grad_()
        unused = torch.ones(2, device=device, requires_grad=True)
        return torch.autograd.grad((leaf**3).sum() + unused.sum(), (leaf, unused))

    return Program(run, [x])


def double_backward(device: torch.device) -> Program:
    weight, x = torch.randn(4, 4, device=device, requires_grad=True), torch.randn(3, 4, device=device)
    weight.grad = torch.zeros_like(weight)

    def run() -> Tensor:
        leaf = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad((leaf @ weight).tanh().sum(), leaf, create_graph=True)
        penalty = slope.square().sum()
        penalty.backward()
        return penalty.detach()

    return Program(run, [x], [weight.grad])


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, scale: float) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x * x * scale

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        (x,) = ctx.saved_tensors
        return 2 * ctx.scale * x * gradient, None


def custom_function(device: torch.device) -> Program:
    x = torch.randn(3, 4, device=device, requires_grad=True)
    x.grad = torch.zeros_like(x)

    def run() -> Tensor:
        result = Squared.apply(x, 1.5)
        result.sum().backward()
        return result.detach()

    return Program(run, [x], [x.grad])


def add_to(total: Tensor, gradient: Tensor | None) -> None:
    total.add_(gradient)


def hooks(device: torch.device) -> Program:
    """Hooks run in the capture; what they compute is replayed."""
    weight, x = torch.randn(4, 4, device=device, requires_grad=True), torch.randn(3, 4, device=device)
    weight.grad, main_grad = torch.zeros_like(weight), torch.zeros(4, 4, device=device)
    weight.register_hook(lambda gradient: gradient * 2)
    weight.register_post_accumulate_grad_hook(lambda leaf: add_to(main_grad, leaf.grad))

    def run() -> None:
        (x @ weight).relu().sum().backward()

    return Program(run, [x], [weight.grad, main_grad])


@pytest.mark.parametrize(
    "build",
    [
        *(accumulation, zeroed_inside, gradient_of_input, gradient_returned, double_backward, custom_function),
        hooks,
    ],
    ids=lambda build: build.__name__,
)
def test_backward(engine: Engine, build: Build) -> None:
    assert_replays_equal_eager(engine, build)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_draws_the_same_dropout_again(engine: Engine, use_reentrant: bool) -> None:
    def build(device: torch.device) -> Program:
        weight, x = torch.randn(6, 6, device=device, requires_grad=True), torch.randn(4, 6, device=device)
        weight.grad = torch.zeros_like(weight)

        def run() -> tuple[Tensor, Tensor]:
            hidden = x.detach().requires_grad_()
            for _ in range(2):
                hidden = checkpoint(
                    lambda h: functional.dropout((h @ weight).relu(), 0.5), hidden, use_reentrant=use_reentrant
                )
            hidden.sum().backward()
            return hidden.detach(), torch.rand(3, device=device)

        return Program(run, [x], [weight.grad])

    assert_replays_equal_eager(engine, build)


@pytest.mark.parametrize("kind", ["fused", "foreach", "sgd"])
def test_optimizer_step(engine: Engine, kind: str) -> None:
    if kind == "foreach" and engine.device.type == "cpu":
        pytest.skip("foreach AdamW reads its step count on the CPU: see test_host_reads.py")

    def build(device: torch.device) -> Program:
        model, x = network(device), torch.randn(5, 6, device=device)
        rate = torch.tensor(0.1, device=device)
        options: dict[str, object] = {
            "fused": {"fused": True, "capturable": True, "lr": rate},
            "foreach": {"foreach": True, "capturable": True, "lr": rate},
            "sgd": {"foreach": True, "momentum": 0.9, "lr": 0.1},
        }
        make = torch.optim.SGD if kind == "sgd" else torch.optim.AdamW
        optimizer = make(model.parameters(), **options[kind])  # type: ignore[arg-type]
        model(x).square().mean().backward()
        optimizer.step()  # creates the optimizer's state

        def run() -> Tensor:
            optimizer.zero_grad(set_to_none=False)
            loss = model(x).square().mean()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            return torch.stack([loss.detach(), norm.detach()])

        moments = [value for state in optimizer.state.values() for value in state.values() if value is not None]
        return Program(run, [x, rate], [*model.parameters(), *gradients(model), *moments])

    assert_replays_equal_eager(engine, build)


@pytest.mark.parametrize("where", ["inside", "ambient"])
def test_autocast_casts_the_current_weight(engine: Engine, where: str) -> None:
    """The weight is used twice, so that its cast comes from the cache once, and is changed between replays."""
    autocast = lambda: torch.autocast(engine.device.type, dtype=torch.bfloat16)  # noqa: E731

    def build(device: torch.device) -> Program:
        weight, x = torch.randn(6, 6, device=device, requires_grad=True), torch.randn(4, 6, device=device)
        weight.grad = torch.zeros_like(weight)

        def step() -> Tensor:
            hidden = functional.linear(functional.linear(x, weight), weight)
            loss = hidden.float().square().mean()
            loss.backward()
            return hidden.detach()

        def run() -> Tensor:
            if where == "ambient":
                return step()
            with autocast():
                return step()

        return Program(run, [x, weight], [weight.grad])

    if where == "ambient":
        assert_replays_equal_eager(engine, build, context=autocast)
    else:
        assert_replays_equal_eager(engine, build)
