"""The search for the first module where it is not straight ahead."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from tests.verification import faulty
from tests.verification.ways import WAYS
from torch import Tensor, nn

import graphstep
from graphstep.verification import Part, VerifyReport


def verified(way: str, model: nn.Module, device: torch.device) -> VerifyReport:
    with WAYS[way](model.to(device), device) as (target, batches, step):
        return graphstep.verify(target, batches, step)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("way", ["graph_step", "full_iteration"])
def test_a_module_that_writes_into_its_argument(way: str, device: torch.device) -> None:
    report = verified(way, faulty.Model(faulty.WritesIntoItsArgument()), device)
    assert report.first is not None
    assert (report.first.module, report.first.part) == ("blocks.1", Part.GRADIENT)


@pytest.mark.parametrize("way", ["attach", "graph_step", "full_iteration"])
def test_what_an_eager_run_renews_is_stale_when_it_is_looked_for(way: str, device: torch.device) -> None:
    report = verified(way, faulty.Model(faulty.StaleAttribute()), device)
    assert report.first is not None
    assert (report.first.module, report.first.part) == ("blocks.1.derived", Part.FORWARD)


def test_a_module_that_cannot_be_captured_with_taps(device: torch.device) -> None:
    report = verified("full_iteration", faulty.Model(faulty.Untappable()), device)
    assert not report.equal
    assert report.first is not None
    assert "modules were not looked into" in report.first.how


class BetweenModules(faulty.Model):
    """The fault is in the code of the model itself."""

    def __init__(self) -> None:
        super().__init__(faulty.Plain())
        self.hidden = faulty.Hidden()

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.first(x)) * (1 + 1 / self.hidden.count())
        return self.head(self.blocks[2](self.blocks[1](x)))


class AtTheEnd(faulty.Model):
    def __init__(self) -> None:
        super().__init__(faulty.Plain())
        self.hidden = faulty.Hidden()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1 / self.hidden.count())


@pytest.mark.parametrize(
    ("build", "tensor"), [(BetweenModules, "argument[0]"), (AtTheEnd, "result")], ids=["between", "end"]
)
def test_the_model_s_own_code(build: Callable[[], nn.Module], tensor: str, device: torch.device) -> None:
    report = verified("graph_step", build(), device)
    assert report.first is not None
    assert (report.first.module, report.first.part) == (build.__name__, Part.FORWARD)
    assert report.first.difference.tensor == tensor


def test_code_of_the_step_outside_of_modules(device: torch.device) -> None:
    model = faulty.Model(faulty.Plain()).to(device)
    hidden = faulty.Hidden()

    @graphstep.graph_step
    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        loss = model(x).square().mean() * (1 + 1 / hidden.count())
        loss.backward()
        return loss.detach()

    report = graphstep.verify(step, faulty.batches(device))
    step.close()
    assert report.first is not None
    assert report.first.module == ""
    assert "the step, outside of its modules" in str(report.first)


def test_the_first_of_two_faults(device: torch.device) -> None:
    model = faulty.Model(faulty.Counting())
    model.blocks[2] = faulty.Counting()
    report = verified("graph_step", model, device)
    assert report.first is not None
    assert report.first.module == "blocks.1"


def test_a_module_that_is_called_twice(device: torch.device) -> None:
    model = faulty.Model(faulty.Counting())
    model.blocks.append(model.blocks[1])
    report = verified("full_iteration", model, device)
    assert report.first is not None
    assert (report.first.module, report.first.part) == ("blocks.1", Part.FORWARD)
    assert report.first.difference.tensor == "result (call 1)"


class HookOnGradient(faulty.Plain):
    """A hook on a gradient multiplies by a number of the host."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = faulty.Hidden()

    def spoil(self, gradient: Tensor) -> Tensor:
        return gradient * (1.0 + self.hidden.count() % 3)


class OnItsResult(HookOnGradient):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y.register_hook(self.spoil)
        return y


class OnItsArgument(HookOnGradient):
    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(self.spoil)
        return super().forward(x)


class OnResultOfInner(HookOnGradient):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y.register_hook(self.spoil)
        return x + self.outer(torch.tanh(y))


class OnWrittenResultOfInner(HookOnGradient):
    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y += x
        y.register_hook(self.spoil)
        return self.outer(y)


class OnResultInTuple(HookOnGradient):
    def forward(self, x: Tensor) -> dict[str, tuple[Tensor]]:
        y = super().forward(x)
        y.register_hook(self.spoil)
        return {"hidden": (y,)}


class Around(faulty.Plain):
    def __init__(self) -> None:
        super().__init__()
        self.deep = OnResultInTuple()

    def forward(self, x: Tensor) -> Tensor:
        (y,) = self.deep(x)["hidden"]
        return super().forward(y)


class Record(NamedTuple):
    hidden: Tensor


class OnResultInRecord(HookOnGradient):
    """Records are handed on as they are, with no alias in them."""

    def forward(self, x: Tensor) -> Record:
        y = super().forward(x)
        y.register_hook(self.spoil)
        return Record(y)


class AroundRecord(faulty.Plain):
    def __init__(self) -> None:
        super().__init__()
        self.deep = OnResultInRecord()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.deep(x).hidden)


class OnResultBesideWrites(HookOnGradient):
    """It writes into its argument too, so that modules get no aliases of theirs."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x.mul_(0.5))
        y.register_hook(self.spoil)
        return y


@pytest.mark.parametrize(
    ("build", "module"),
    [
        (OnItsResult, "blocks.1"),
        (OnItsArgument, "blocks.1"),
        (OnResultOfInner, "blocks.1"),
        (OnWrittenResultOfInner, "blocks.1"),
        (Around, "blocks.1.deep"),
        (AroundRecord, "blocks.1.deep"),
        (OnResultBesideWrites, "blocks.1"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_hook_is_the_fault_of_the_module_that_registers_it(
    build: Callable[[], nn.Module], module: str, device: torch.device
) -> None:
    report = verified("graph_step", faulty.Model(build()), device)
    assert report.first is not None
    assert (report.first.module, report.first.part) == (module, Part.GRADIENT)
