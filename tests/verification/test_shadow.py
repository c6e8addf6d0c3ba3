"""Beside a run by graphs some calls run eagerly as well: what differs is reported, and the run is the one without."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.verification import faulty
from tests.verification.ways import forward_backward
from torch import Tensor, nn

import graphstep
from graphstep.errors import ConfigError
from graphstep.verification import Part, VerifyReport

Trace = tuple[list[Tensor], nn.Module, list[VerifyReport]]
NUM_STEPS = 12


def trained_attached(model: faulty.Model, data: list[Tensor], told: Callable[[VerifyReport], None] | None) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-7, fused=True)
    losses = []
    with graphstep.attach(model, regions=faulty.REGIONS) as manager:
        shadow = None if told is None else graphstep.shadow(manager, interval=5, on_report=told)
        for start in range(0, 2 * NUM_STEPS, 2):
            optimizer.zero_grad()
            for x in data[start : start + 2]:
                loss = model(x).square().mean()
                (loss / 2).backward()
                losses.append(loss.detach())
            optimizer.step()
        if shadow is not None:
            shadow.close()
        rows = manager.report().rows
        return losses, [(row.name, row.num_replays, dict(row.eager_calls)) for row in rows]


def trained_by_step(model: faulty.Model, data: list[Tensor], told: Callable[[VerifyReport], None] | None) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-7, fused=True)

    @graphstep.graph_step
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = step if told is None else graphstep.shadow(step, interval=5, on_report=told)
    losses = [run(x=x) for x in data[:NUM_STEPS]]
    step.close()
    return losses, None


def trained_by_iteration(model: faulty.Model, data: list[Tensor], told: Callable[[VerifyReport], None] | None) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-7, fused=True)
    wrapper = graphstep.FullCudaGraphWrapper(
        forward_backward, model=model, session=graphstep.GraphSession(data[0].device)
    )
    run = wrapper if told is None else graphstep.shadow(wrapper, interval=5, on_report=told)
    batches = iter(data)
    losses = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        losses.append(run(data_iterator=batches, num_microbatches=2))
        optimizer.step()
    wrapper.close()
    return losses, None


def trained_by_callables(model: faulty.Model, data: list[Tensor], told: Callable[[VerifyReport], None] | None) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-7, fused=True)
    sample = torch.randn(4, faulty.WIDTH, device=data[0].device, requires_grad=True)
    modules = (model.first, *model.blocks, model.head)
    graphed = graphstep.make_graphed_callables(modules, tuple((sample,) for _ in modules))
    shadow = None if told is None else graphstep.shadow(graphed, interval=5, on_report=told)
    losses = []
    for batch in data[:NUM_STEPS]:
        optimizer.zero_grad()
        x = batch.clone().requires_grad_()
        for each in graphed:
            x = each(x)
        loss = x.square().mean()
        loss.backward()
        losses.append(loss.detach())
        del x, loss
        optimizer.step()
    if shadow is not None:
        shadow.close()
    modules[0].forward.reset()
    return losses, None


TRAINED = {
    "attach": trained_attached,
    "graph_step": trained_by_step,
    "full_iteration": trained_by_iteration,
    "callables": trained_by_callables,
}


def trained(way: str, fault: type[nn.Module], device: torch.device, *, has_shadow: bool) -> Any:
    torch.manual_seed(0)
    model = faulty.Model(fault()).to(device)
    data = faulty.batches(device, 2 * NUM_STEPS)
    reports: list[VerifyReport] = []
    losses, counts = TRAINED[way](model, data, reports.append if has_shadow else None)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return losses, counts, state, gradients, torch.get_rng_state(), reports


@pytest.mark.parametrize("way", TRAINED)
def test_the_run_is_the_one_without_a_shadow(way: str, device: torch.device) -> None:
    losses, counts, state, gradients, generator, _ = trained(way, faulty.Plain, device, has_shadow=False)
    found = trained(way, faulty.Plain, device, has_shadow=True)
    assert all(torch.equal(a, b) for a, b in zip(losses, found[0], strict=True))
    assert counts == found[1]
    assert all(torch.equal(state[name], found[2][name]) for name in state)
    assert all(torch.equal(a, b) for a, b in zip(gradients, found[3], strict=True))
    assert torch.equal(generator, found[4])
    assert len(found[5]) >= 2
    for report in found[5]:
        assert report.equal, str(report)
        assert report.num_replays > 0
        assert {row.part for row in report.rows} >= {Part.FORWARD, Part.GRADIENT, Part.RANDOM}


@pytest.mark.parametrize(
    ("fault", "part"),
    [
        (faulty.Counting, Part.FORWARD),
        (faulty.WrongWeightGradient, Part.GRADIENT),
        (faulty.DriftingBuffer, Part.BUFFER),
    ],
)
@pytest.mark.parametrize("way", TRAINED)
def test_a_fault_is_reported(way: str, fault: type[nn.Module], part: Part, device: torch.device) -> None:
    reports = trained(way, fault, device, has_shadow=True)[5]
    different = [report for report in reports if not report.equal]
    assert different
    first = different[0].first
    assert first is not None
    assert first.part is part
    if way == "callables":
        assert first.module == fault.__name__
    elif part is Part.FORWARD and way != "attach":
        assert first.module == ""  # Modules inside of one graph are not seen from outside.
    else:
        assert first.module == "blocks.1"


class WithLoss(faulty.Model):
    """Returns its loss, what the loss is computed from, and that once more."""

    def forward(self, x: Tensor) -> Any:
        result = super().forward(x)
        return {"loss": result.square().mean(), "logits": result, "again": [result]}


@pytest.mark.parametrize("uses_logits", [False, True])
@pytest.mark.parametrize("fault", [faulty.Plain, faulty.WrongWeightGradient])
def test_results_that_are_computed_from_each_other(
    uses_logits: bool, fault: type[nn.Module], device: torch.device
) -> None:
    model = WithLoss(fault()).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-7)
    found: list[VerifyReport] = []
    with graphstep.attach(model, regions=faulty.REGIONS) as manager:
        shadow = graphstep.shadow(manager, interval=3, on_report=found.append)
        for x in faulty.batches(device, 6):
            result = model(x)
            (result["loss"] + (result["logits"].abs().sum() if uses_logits else 0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            del result  # A result that is kept is not overwritten: the next call would run eagerly.
        shadow.close()
    assert len(found) == 2
    assert all(report.equal for report in found) == (fault is faulty.Plain)
    assert all(report.num_replays for report in found)


def test_results_of_captured_modules_are_rows(device: torch.device) -> None:
    (report, *_) = trained("attach", faulty.Plain, device, has_shadow=True)[5]
    seen = {row.module for row in report.rows if row.part is Part.FORWARD}
    assert seen == {"", "first", "blocks.0", "blocks.1", "blocks.2", "head"}


def test_calls_before_a_capture_are_not_compared(device: torch.device) -> None:
    model = faulty.Model(faulty.Plain()).to(device)
    reports: list[VerifyReport] = []
    with graphstep.attach(model, regions=faulty.REGIONS) as manager:
        shadow = graphstep.shadow(manager, interval=1, on_report=reports.append)
        for number, x in enumerate(faulty.batches(device, 4)):
            model(x).square().mean().backward()
            if number >= 1:
                manager.end_step()
        with torch.no_grad():
            model(x)
        model.eval()(x)
        shadow.close()
        shadow.close()
    assert [report.target for report in reports] == ["call 3 of Model", "call 4 of Model"]


def test_weights_that_were_written_before_the_comparison(device: torch.device) -> None:
    """By hand: optimizers of torch are seen to step."""
    model = faulty.Model(faulty.Plain()).to(device)
    reports: list[VerifyReport] = []
    with graphstep.attach(model, regions=faulty.REGIONS) as manager:
        shadow = graphstep.shadow(manager, interval=1, on_report=reports.append)
        for x in faulty.batches(device, 3):
            model(x).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
            manager.end_step()
        shadow.close()
    assert reports
    assert not any(report.rows or report.equal for report in reports)
    assert reports[0].notes == ("its weights were written, or it had several backwards",)


def test_by_default_it_is_logged(device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    model = faulty.Model(faulty.Counting()).to(device)
    with caplog.at_level(logging.INFO, "graphstep.shadow"), graphstep.attach(model, regions=faulty.REGIONS) as manager:
        shadow = graphstep.shadow(manager, interval=1)
        for x in faulty.batches(device, 3):
            model(x).square().mean().backward()
            manager.end_step()
        shadow.close()
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    assert "blocks.1, forward" in caplog.text


@pytest.mark.parametrize(("interval", "code"), [(0, "shadow-interval"), (1, "verify-target")])
def test_what_cannot_be_shadowed(interval: int, code: str) -> None:
    with pytest.raises(ConfigError) as error:
        graphstep.shadow(nn.Linear(2, 2), interval=interval)
    assert [problem.code for problem in error.value.problems] == [code]


def test_functions_cannot_be_watched(device: torch.device) -> None:
    x = torch.ones(3, device=device, requires_grad=True)
    graphed = graphstep.make_graphed_callables(lambda value: value * 2, (x,))
    with pytest.raises(ConfigError, match="calls of functions cannot be watched"):
        graphstep.shadow(graphed, interval=3)
    graphed.reset()
