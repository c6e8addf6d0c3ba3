"""Whole steps whose gradients are added many at a time: equal to eager, with fewer operations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphstep
from graphstep.capture.session import GraphSession
from graphstep.strategies.full_iteration import FullCudaGraphWrapper

HIDDEN, NUM_LAYERS, NUM_STEPS = 8, 4, 7


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(NUM_LAYERS))
        self.head = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.seen = nn.Buffer(torch.zeros(()))
        self.looks = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if self.looks and x.requires_grad:
            x.register_hook(self._look)
        for layer in self.layers[1:]:
            x = x + torch.tanh(layer(x))
        return (self.head(x) @ self.head.weight).square().mean()

    def _look(self, _: Tensor) -> None:
        """In the middle of the backward pass: what the last layer has been given is complete in eager execution."""
        weight = self.layers[-1].weight
        if weight.grad is not None:
            self.seen.add_(weight.grad.norm())


def forward_backward(
    *, data_iterator: Iterator[Tensor], model: nn.Module, num_microbatches: int, forward_only: bool = False
) -> Tensor:
    losses = []
    for _ in range(num_microbatches):
        loss = model(next(data_iterator)) / num_microbatches
        if not forward_only:
            loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def built(device: torch.device, **attributes: Any) -> Model:
    torch.manual_seed(0)
    model = Model().to(device)
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def batches(step: int, number: int, device: torch.device) -> list[Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return [torch.randn(5, HIDDEN, generator=drawn).to(device) for _ in range(number)]


def state(model: nn.Module) -> list[Tensor | None]:
    return [*(p.grad.clone() if p.grad is not None else None for p in model.parameters()), *model.buffers()]


def assert_same(left: list[Tensor | None], right: list[Tensor | None]) -> None:
    for mine, theirs in zip(left, right, strict=True):
        assert (mine is None) is (theirs is None)
        if mine is not None and theirs is not None:
            assert torch.equal(mine, theirs)


Zero = Callable[[nn.Module, int], None]


def to_none(model: nn.Module, step: int) -> None:
    model.zero_grad(set_to_none=True)


def in_place(model: nn.Module, step: int) -> None:
    model.zero_grad(set_to_none=False)


def every_third(model: nn.Module, step: int) -> None:
    if step % 3 == 0:
        model.zero_grad()


def one_flat_buffer(model: nn.Module, step: int) -> None:
    parameters = list(model.parameters())
    if step == 0:
        sizes = [p.numel() for p in parameters]
        parts = torch.zeros(sum(sizes), device=parameters[0].device).split(sizes)
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
    model.zero_grad(set_to_none=False)


@pytest.mark.parametrize("num_microbatches", [1, 3])
@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("zero", [to_none, in_place, every_third, one_flat_buffer], ids=lambda zero: zero.__name__)
def test_iterations(zero: Zero, looks: bool, num_microbatches: int, device: torch.device) -> None:
    """Gradients and what a hook has read of them, also with a forward-only stage in between."""
    eager = built(device, looks=looks)
    models = {gathers: built(device, looks=looks) for gathers in (False, True)}
    sessions = {gathers: GraphSession(device) for gathers in models}
    graphed = {
        gathers: FullCudaGraphWrapper(
            forward_backward,
            model=model,
            session=sessions[gathers],
            gather_gradients=gathers,
            parallel_gradients=gathers,
        )
        for gathers, model in models.items()
    }
    for step in range(NUM_STEPS):
        data = batches(step, num_microbatches, device)
        zero(eager, step)
        expected = forward_backward(data_iterator=iter(data), model=eager, num_microbatches=num_microbatches)
        for gathers, model in models.items():
            zero(model, step)
            wrapper = graphed[gathers]
            found = wrapper.forward_backward(data_iterator=iter(data), num_microbatches=num_microbatches)
            assert torch.equal(found, expected)
            assert_same(state(model), state(eager))
            wrapper.forward_backward(data_iterator=iter(data), num_microbatches=num_microbatches, forward_only=True)
            assert_same(state(model), state(eager))
    rows = {gathers: session.report().rows[0] for gathers, session in sessions.items()}
    for gathers, session in sessions.items():
        assert rows[gathers].num_replays == NUM_STEPS - 3
        session.close()
    if device.type == "cpu":
        # One operation for all that can wait in each backward pass, where there was one for each.
        num_waiting = len(list(eager.parameters())) - looks
        saved = rows[False].num_operations - rows[True].num_operations
        assert saved >= (num_waiting - 1) * num_microbatches


def test_large_gradients_do_not_wait(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphstep.capture.gathered_gradients._LEAST_BYTES", 400)
    eager, model = built(device), built(device)
    with GraphSession(device) as session:
        wrapper = FullCudaGraphWrapper(
            forward_backward, model=model, session=session, gather_gradients=True, parallel_gradients=True
        )
        for step in range(NUM_STEPS):
            data = batches(step, 2, device)
            forward_backward(data_iterator=iter(data), model=eager, num_microbatches=2)
            wrapper.forward_backward(data_iterator=iter(data), num_microbatches=2)
            assert_same(state(model), state(eager))


class Job:
    """A loop that accumulates over several calls of its backward and steps in the graph."""

    def __init__(self, device: torch.device, *, set_to_none: bool, gathers: bool | None) -> None:
        self.model, self.set_to_none = built(device), set_to_none
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2.0**-7, fused=True)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        options = {} if gathers is None else {"gather_gradients": gathers, "parallel_gradients": gathers}
        self.step: Any = self.run if gathers is None else graphstep.graph_step(self.run, **options)

    def run(self, data: list[Tensor]) -> tuple[Tensor, Tensor]:
        self.optimizer.zero_grad(set_to_none=self.set_to_none)
        losses = []
        for x in data:
            loss = self.model(x)
            loss.backward()
            losses.append(loss.detach())
        norm = graphstep.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()
        return torch.stack(losses), norm


@pytest.mark.parametrize("set_to_none", [False, True])
@pytest.mark.parametrize("num_microbatches", [1, 2])
def test_steps_with_their_optimizer(set_to_none: bool, num_microbatches: int, device: torch.device) -> None:
    jobs = [Job(device, set_to_none=set_to_none, gathers=gathers) for gathers in (None, False, True)]
    for step in range(8):
        data = batches(step, num_microbatches, device)
        results = [job.step(data) for job in jobs]
        for job, (losses, norm) in zip(jobs[1:], results[1:], strict=True):
            assert torch.equal(losses, results[0][0])
            assert torch.equal(norm, results[0][1])
            assert_same([*job.model.parameters()], [*jobs[0].model.parameters()])
        for job in jobs:
            job.scheduler.step()
    for job in jobs[1:]:
        assert job.step.report().rows[0].num_replays > 0
        job.step.close()


def test_a_capture_that_fails_leaves_gradients_and_hooks_as_they_were(device: torch.device) -> None:
    model = built(device)

    def reads(*, data_iterator: Iterator[Tensor], model: nn.Module, num_microbatches: int, **_: Any) -> Tensor:
        loss = model(next(data_iterator))
        loss.backward()
        return loss.detach() * float(loss > 0)

    with GraphSession(device) as session:
        wrapper = FullCudaGraphWrapper(
            reads, model=model, session=session, gather_gradients=True, parallel_gradients=True
        )
        for step in range(3):
            wrapper.forward_backward(data_iterator=iter(batches(step, 1, device)), num_microbatches=1)
        before, shown = state(model), [p.grad for p in model.parameters()]
        with pytest.raises(graphstep.errors.CaptureError):
            wrapper.forward_backward(data_iterator=iter(batches(4, 1, device)), num_microbatches=1)
        assert_same(state(model), before)
        assert all(p.grad is gradient for p, gradient in zip(model.parameters(), shown, strict=True))
        assert all(p._backward_hooks is None and p._post_accumulate_grad_hooks is None for p in model.parameters())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_adds_nothing(mode: Callable[[], Any], device: torch.device) -> None:
    model = built(device)
    with GraphSession(device) as session, mode():
        wrapper = FullCudaGraphWrapper(
            forward_backward, model=model, session=session, gather_gradients=True, parallel_gradients=True
        )
        for step in range(5):
            data = batches(step, 1, device)
            found = wrapper.forward_backward(data_iterator=iter(data), num_microbatches=1, forward_only=True)
            expected = forward_backward(data_iterator=iter(data), model=model, num_microbatches=1, forward_only=True)
            assert torch.equal(found, expected)
        assert session.report().rows[0].num_replays == 2


def test_hooks_of_parameters_that_come_later(device: torch.device) -> None:
    """A hook that is registered after the capture drops the graph; the gradient of its parameter does not wait then."""
    eager, model = built(device), built(device)
    with GraphSession(device) as session:
        wrapper = FullCudaGraphWrapper(
            forward_backward, model=model, session=session, gather_gradients=True, parallel_gradients=True
        )
        for step in range(12):
            if step == 5:
                for each in (eager, model):
                    each.head.weight.register_hook(lambda g: g * 3)
            data = batches(step, 2, device)
            for each in (eager, model):
                each.zero_grad()
            forward_backward(data_iterator=iter(data), model=eager, num_microbatches=2)
            wrapper.forward_backward(data_iterator=iter(data), num_microbatches=2)
            assert_same(state(model), state(eager))
        assert session.report().rows[0].num_replays >= 5


# ----- steps that do something with gradients in or between passes


class Square(nn.Module):
    """Three layers, and parameters that are added through views."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.place = nn.Parameter(torch.zeros(5 * HIDDEN))
        self.seen = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = torch.tanh(self.layers[1](x) + self.place.view(5, HIDDEN))
        return self.layers[2](x).square().mean()


Step = Callable[["Square", Tensor, Tensor], Tensor]


def gradients_in_between(model: Square, x: Tensor, y: Tensor) -> Tensor:
    """``torch.autograd.grad`` adds to nothing, and the step does it itself."""
    model(x).backward()
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, torch.autograd.grad(model(y), parameters), strict=True):
        if parameter.grad is None:
            parameter.grad = gradient.clone()
        else:
            parameter.grad.add_(gradient)
    return model(x).detach()


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient.mul_(2)


def gradients_written_in_place(model: Square, x: Tensor, y: Tensor) -> Tensor:
    """What the parameter was given is a view of what a function writes afterwards."""
    hidden = InPlace.apply(model.layers[0](x)) + model.place.view(5, HIDDEN)
    loss: Tensor = model.layers[1](hidden).square().mean()
    loss.backward()
    model(y).backward()
    return loss.detach()


class Scratch(torch.autograd.Function):
    """Writes the gradients of several weights to the same memory, one after another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scratch: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.scratch = scratch
        return x @ weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        torch.mm(x.t(), gradient, out=ctx.scratch)
        return gradient @ weight.t(), ctx.scratch.view(HIDDEN, HIDDEN), None


def gradients_in_one_place(model: Square, x: Tensor, y: Tensor) -> Tensor:
    scratch = torch.empty(HIDDEN, HIDDEN, device=x.device)
    for layer in model.layers:
        x = torch.tanh(Scratch.apply(x, layer.weight, scratch))
    loss = x.square().mean() + 0 * sum(layer.bias.sum() for layer in model.layers) + 0 * model.place.sum()
    loss.backward()
    return loss.detach()


class StopHereError(Exception):
    pass


def passes_that_stop(model: Square, x: Tensor, y: Tensor) -> Tensor:
    """A pass that fails has added what it had come to, and the step goes on with that."""

    def stop(_: Tensor) -> None:
        raise StopHereError

    hidden = model.layers[0](x)
    hidden.register_hook(stop)
    try:
        model.layers[2](model.layers[1](hidden)).square().mean().backward()
    except StopHereError:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
    loss: Tensor = model(y)
    loss.backward()
    return loss.detach()


def hooks_of_the_step(model: Square, x: Tensor, y: Tensor) -> Tensor:
    """They read what is there before their parameter is given more."""
    weight = model.layers[0].weight

    def read(gradient: Tensor) -> None:
        if weight.grad is not None:
            model.seen.add_(weight.grad.norm() + gradient.norm())

    losses = []
    for batch in (x, y):
        handles = [weight.register_hook(read), model.layers[2].bias.register_hook(read)]
        losses.append(model(batch))
        losses[-1].backward()
        for handle in handles:
            handle.remove()
    return torch.stack(losses).detach()


def hooks_after_an_addition(model: Square, x: Tensor, y: Tensor) -> Tensor:
    weight = model.layers[1].weight

    def read(parameter: Tensor) -> None:
        assert parameter.grad is not None
        model.seen.add_(parameter.grad.norm())

    handle = weight.register_post_accumulate_grad_hook(read)
    loss: Tensor = model(x)
    loss.backward()
    handle.remove()
    model(y).backward()
    return loss.detach()


STEPS: list[Step] = [
    gradients_in_between,
    gradients_written_in_place,
    gradients_in_one_place,
    passes_that_stop,
    hooks_of_the_step,
    hooks_after_an_addition,
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_what_a_step_does_with_gradients(step: Step, device: torch.device) -> None:
    def built() -> Square:
        torch.manual_seed(0)
        model = Square().to(device)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return model

    eager, model = built(), built()
    graphed = graphstep.graph_step(
        lambda x, y: step(model, x, y), modules=[model], gather_gradients=True, parallel_gradients=True
    )
    for number in range(8):
        x, y = batches(number, 2, device)
        expected = step(eager, x, y)
        assert torch.equal(graphed(x, y), expected)
        assert_same(state(model), state(eager))
        if number % 3 == 2:
            for each in (eager, model):
                each.zero_grad(set_to_none=False)
    assert graphed.report().rows[0].num_replays >= 4
    graphed.close()
