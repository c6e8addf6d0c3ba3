"""What a step reads from variables and objects is noticed when it changes, and only that."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import graphstep
from graphstep.errors import CaptureError
from graphstep.strategies.step_reads import StepReads

FACTOR = 1.0
OTHER = 1.0
"""Read by methods only."""


def by_the_global(value: Tensor) -> Tensor:
    return value * FACTOR


def handed_on(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(method)
    def around(*args: Any) -> Tensor:
        return method(*args)

    return around


def with_own_factor(value: Tensor) -> Tensor:
    return value * with_own_factor.factor  # type: ignore[attr-defined, no-any-return]


class Loss:
    """An object that is called."""

    shared = 1.0

    def __init__(self) -> None:
        self.factor = 1.0
        self.options = {"power": 1.0}

    def __call__(self, output: Tensor) -> Tensor:
        return output.square().mean() * self.factor * self.options["power"]

    def of(self, output: Tensor) -> Tensor:
        return output.square().mean() * self.shared

    def by_the_global(self, output: Tensor) -> Tensor:
        return output.square().mean() * OTHER


def shared_of(loss: Any, output: Tensor) -> Tensor:
    value: Tensor = output.square().mean() * loss.shared
    return value


def method_of(loss: Any, output: Tensor) -> Tensor:
    value: Tensor = loss.by_the_global(output)
    return value


class Scaled(torch.autograd.Function):
    """Its backward scales by a number of the class."""

    factor = 1.0

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * Scaled.factor


scaled_gradient: Any = Scaled.apply


class ModuleLoss(nn.Module):
    """A module whose forward is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def of(self, output: Tensor) -> Tensor:
        return output.square().mean() * self.factor


class ReadsTheGlobal(nn.Linear):
    """Its forward reads a variable."""

    def forward(self, values: Tensor) -> Tensor:
        return super().forward(values) * FACTOR


class ReadsItInAMethod(nn.Linear):
    """The same in a method that its forward calls."""

    def forward(self, values: Tensor) -> Tensor:
        return self.scaled(super().forward(values))

    def scaled(self, values: Tensor) -> Tensor:
        return values * OTHER


class Slotted:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


class Trainer:
    """A step that is a method, as many loops have it."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = ReadsTheGlobal(4, 3).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=2.0**-5, fused=True)
        self.loss, self.module_loss, self.slotted = Loss(), ModuleLoss(), Slotted()
        self.factor, self.inner, self.step, self.calls = 1.0, 1.0, 0, 0
        self.other = ReadsItInAMethod(4, 3).to(device)
        self.terms = {"one": [self.loss.by_the_global]}
        self.target = torch.zeros(3, device=device)
        self.factors = np.ones(2)
        self.own = threading.local()
        self.own.factor = 1.0
        self.last: Tensor | None = None
        self.counts: dict[int, str] = {}
        self.history: list[Tensor] = []

    @property
    def seen(self) -> float:
        return self.inner

    def backward(self, loss: Tensor) -> Tensor:
        loss.backward()
        self.optimizer.step()
        self.last = loss.detach()
        return loss.detach()

    def output(self, values: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        output: Tensor = self.model(values)
        return output

    def attribute(self, values: Tensor) -> Tensor:
        return self.backward(self.output(values).square().mean() * self.factor)

    def behind_a_property(self, values: Tensor) -> Tensor:
        return self.backward(self.output(values).square().mean() * self.seen)

    def called_object(self, values: Tensor) -> Tensor:
        return self.backward(self.loss(self.output(values)))

    def method_of_an_object(self, values: Tensor) -> Tensor:
        return self.backward(self.loss.of(self.output(values)))

    def method_of_a_module(self, values: Tensor) -> Tensor:
        return self.backward(self.module_loss.of(self.output(values)))

    def slot(self, values: Tensor) -> Tensor:
        kept = self.slotted
        return self.backward(self.output(values).square().mean() * kept.factor)

    def variable_of_the_module(self, values: Tensor) -> Tensor:
        return self.backward(by_the_global(self.output(values).square().mean()))

    def variable_of_a_forward(self, values: Tensor) -> Tensor:
        return self.backward(self.output(values).square().mean())

    def method_of_a_forward(self, values: Tensor) -> Tensor:
        return self.backward(self.output(values).square().mean() + self.other(values).square().mean())

    def method_of_what_a_function_is_given(self, values: Tensor) -> Tensor:
        return self.backward(method_of(self.loss, self.output(values)))

    def class_of_what_a_function_is_given(self, values: Tensor) -> Tensor:
        return self.backward(shared_of(self.loss, self.output(values)))

    def functions_in_containers(self, values: Tensor) -> Tensor:
        return self.backward(self.terms["one"][0](self.output(values)))

    def inside_a_function(self, values: Tensor) -> Tensor:
        def scaled(output: Tensor) -> Tensor:
            return output.square().mean() * self.factor

        return self.backward(scaled(self.output(values)))

    @torch.enable_grad()
    def under_a_decorator(self, values: Tensor) -> Tensor:
        return self.attribute(values)

    @handed_on
    def under_an_own_decorator(self, values: Tensor) -> Tensor:
        return self.attribute(values)

    def attribute_of_a_function(self, values: Tensor) -> Tensor:
        return self.backward(with_own_factor(self.output(values).square().mean()))

    def function_of_autograd(self, values: Tensor) -> Tensor:
        output: Tensor = Scaled.apply(self.output(values))  # type: ignore[no-untyped-call]
        return self.backward(output.square().mean())

    def variable_for_its_apply(self, values: Tensor) -> Tensor:
        return self.backward(scaled_gradient(self.output(values)).square().mean())

    def array(self, values: Tensor) -> Tensor:
        return self.backward(self.output(values).square().mean() * float(self.factors[1]))

    def of_the_thread(self, values: Tensor) -> Tensor:
        return self.backward(self.output(values).square().mean() * self.own.factor)

    def tensor(self, values: Tensor) -> Tensor:
        return self.backward((self.output(values) - self.target).square().mean())

    def counting(self, values: Tensor) -> Tensor:
        self.calls += 1
        return self.attribute(values)

    def carrying(self, values: Tensor) -> Tensor:
        loss, before = self.attribute(values), self.last
        self.target = self.target * 0.5
        return loss + self.target.sum() if before is not None else loss

    def carrying_in_a_list(self, values: Tensor) -> Tensor:
        self.history.append((self.history[-1] if self.history else self.target) * 0.5)
        return self.attribute(values) + self.history[-1].sum()

    def counting_in_a_list(self, values: Tensor) -> Tensor:
        self.history.append(self.target)
        return self.attribute(values) * len(self.history)

    def counting_in_a_dict(self, values: Tensor) -> Tensor:
        self.counts[len(self.counts)] = "call"
        return self.attribute(values) * len(self.counts)

    def appending(self, values: Tensor) -> Tensor:
        self.history.append(self.target)
        return self.attribute(values)


def set_global(value: float, name: str = "FACTOR") -> None:
    globals()[name] = value


def set_own_factor(value: float) -> None:
    with_own_factor.factor = value  # type: ignore[attr-defined]


def replace_target(trainer: Trainer) -> None:
    trainer.target = torch.ones_like(trainer.target)


CHANGES: dict[str, Callable[[Trainer], Any]] = {
    "attribute": lambda t: setattr(t, "factor", 3.0),
    "behind_a_property": lambda t: setattr(t, "inner", 3.0),
    "called_object": lambda t: t.loss.options.update(power=3.0),
    "method_of_an_object": lambda t: setattr(t.loss, "shared", 3.0),
    "method_of_a_module": lambda t: setattr(t.module_loss, "factor", 3.0),
    "slot": lambda t: setattr(t.slotted, "factor", 3.0),
    "variable_of_the_module": lambda t: set_global(3.0),
    "variable_of_a_forward": lambda t: set_global(3.0),
    "method_of_a_forward": lambda t: set_global(3.0, "OTHER"),
    "method_of_what_a_function_is_given": lambda t: set_global(3.0, "OTHER"),
    "class_of_what_a_function_is_given": lambda t: setattr(Loss, "shared", 3.0),
    "functions_in_containers": lambda t: set_global(3.0, "OTHER"),
    "inside_a_function": lambda t: setattr(t, "factor", 3.0),
    "under_a_decorator": lambda t: setattr(t, "factor", 3.0),
    "under_an_own_decorator": lambda t: setattr(t, "factor", 3.0),
    "attribute_of_a_function": lambda t: set_own_factor(3.0),
    "function_of_autograd": lambda t: setattr(Scaled, "factor", 3.0),
    "variable_for_its_apply": lambda t: setattr(Scaled, "factor", 3.0),
    "of_the_thread": lambda t: setattr(t.own, "factor", 3.0),
    "array": lambda t: t.factors.fill(3.0),
    "tensor": replace_target,
}


def run(device: torch.device, name: str, is_graphed: bool, change: Callable[[Trainer], Any]) -> tuple[Tensor, Any]:
    set_global(1.0)
    set_own_factor(1.0)
    set_global(1.0, "OTHER")
    Loss.shared = Scaled.factor = 1.0
    trainer = Trainer(device)
    step: Any = getattr(trainer, name)
    step = graphstep.graph_step(step) if is_graphed else step
    torch.manual_seed(1)
    losses = []
    for index in range(11):
        if index == 6:
            change(trainer)
        trainer.step += 1  # no business of the step's, which only calls a method of that name
        losses.append(step(torch.randn(5, 4, device=device)))
    set_global(1.0)
    set_global(1.0, "OTHER")
    Loss.shared = Scaled.factor = 1.0
    return torch.stack(losses), step


@pytest.mark.parametrize("name", CHANGES)
def test_what_the_step_reads_is_followed(device: torch.device, name: str) -> None:
    expected, _ = run(device, name, False, CHANGES[name])
    losses, step = run(device, name, True, CHANGES[name])
    assert torch.equal(losses, expected)
    row = step.report().rows[0]
    assert row.num_replays == 6, row.eager_calls
    assert sum(row.eager_calls.values()) == 5
    step.close()


@pytest.mark.parametrize("name", ["attribute", "called_object", "tensor"])
def test_what_it_does_not_read_is_left_alone(device: torch.device, name: str) -> None:
    def change(trainer: Trainer) -> None:
        trainer.inner = 5.0
        trainer.calls = 7
        trainer.history.append(trainer.target)

    losses, step = run(device, name, True, change)
    assert step.report().rows[0].num_replays == 8
    assert torch.equal(losses, run(device, name, False, change)[0])
    step.close()


def test_a_counter_of_the_step_is_refused(device: torch.device) -> None:
    """A replay would not count."""
    with pytest.raises(CaptureError, match=r"each run changes self\.calls \(2 before, 3 after\)"):
        run(device, "counting", True, lambda t: None)


@pytest.mark.parametrize(("name", "where"), [("carrying", "self.target"), ("carrying_in_a_list", "self.history")])
def test_a_tensor_that_is_carried_to_the_next_call_is_refused(device: torch.device, name: str, where: str) -> None:
    with pytest.raises(CaptureError, match=r"each run (reads the tensor in|changes) " + where.replace(".", r"\.")):
        run(device, name, True, lambda t: None)


@pytest.mark.parametrize("name", ["counting_in_a_list", "counting_in_a_dict"])
def test_a_list_that_grows_in_each_call_and_is_read_is_refused(device: torch.device, name: str) -> None:
    with pytest.raises(CaptureError, match=r"each run changes self\.(history|counts) "):
        run(device, name, True, lambda t: None)


def test_a_list_that_the_step_fills_is_its_own_business(device: torch.device) -> None:
    _, step = run(device, "appending", True, lambda t: None)
    assert step.report().rows[0].num_replays == 8
    step.close()


def losses_of(device: torch.device, is_graphed: bool, make: Callable[[], Any], change: Callable[[Any], Any]) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 3).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-5, fused=True)
    criterion = make()

    def step(values: Tensor, criterion: Any) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = criterion(model(values))
        loss.backward()
        optimizer.step()
        return loss.detach()

    call: Any = graphstep.graph_step(step) if is_graphed else step
    losses = []
    for index in range(11):
        if index == 6:
            change(criterion)
        losses.append(call(torch.randn(5, 4, device=device), criterion))
    if is_graphed:
        assert call.report().rows[0].num_replays == 6, call.report().rows[0].eager_calls
        call.close()
    return torch.stack(losses)


def weighted(output: Tensor, loss: Loss) -> Tensor:
    return loss(output)


def closing_over(loss: Loss) -> Callable[[Tensor], Tensor]:
    def called(output: Tensor) -> Tensor:
        return loss(output)

    return called


ARGUMENTS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "object": (Loss, lambda c: setattr(c, "factor", 3.0)),
    "function": (lambda: closing_over(Loss()), lambda c: setattr(c.__closure__[0].cell_contents, "factor", 3.0)),
    "bound method": (lambda: ModuleLoss().of, lambda c: setattr(c.__self__, "factor", 3.0)),
    "partial": (
        lambda: functools.partial(weighted, loss=Loss()),
        lambda c: setattr(c.keywords["loss"], "factor", 3.0),
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_what_lies_in_an_argument_is_followed(device: torch.device, name: str) -> None:
    assert torch.equal(losses_of(device, True, *ARGUMENTS[name]), losses_of(device, False, *ARGUMENTS[name]))


def test_a_loss_of_torch_as_an_argument(device: torch.device) -> None:
    """``label_smoothing`` is a number that the graph has baked in."""

    def losses(is_graphed: bool) -> Tensor:
        torch.manual_seed(0)
        model, criterion = nn.Linear(4, 3).to(device), nn.CrossEntropyLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-5, fused=True)

        def step(values: Tensor, labels: Tensor, loss_fn: nn.Module) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = loss_fn(model(values), labels)
            loss.backward()
            optimizer.step()
            return loss.detach()

        call: Any = graphstep.graph_step(step) if is_graphed else step
        found = []
        for index in range(11):
            criterion.label_smoothing = 0.25 if index >= 6 else 0.0
            values, labels = torch.randn(5, 4, device=device), torch.randint(3, (5,), device=device)
            found.append(call(values, labels, criterion))
        return torch.stack(found)

    assert torch.equal(losses(True), losses(False))


def test_places_have_names_that_a_user_knows(device: torch.device) -> None:
    reads = StepReads()
    reads.add_function(Trainer(device).called_object)
    assert {place.path for place in reads.places} >= {"self.loss", "self.model", "self.optimizer"}
    assert "self.factor" not in {place.path for place in reads.places}
    assert len(reads.modules) == 1
