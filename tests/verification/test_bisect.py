"""The search for the first module where it is not straight ahead."""

from __future__ import annotations

from collections.abc import Callable

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
