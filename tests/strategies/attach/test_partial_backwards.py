"""Graphs of several layers that are used in part: their backward is computed again, and the report says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.strategies.attach.plain import LAYERS, Block, Mlp, attached, inputs
from torch import Tensor, nn

from graphstep.capture.reasons import EagerReason
from graphstep.capture.report import CaptureReport

Use = Callable[[nn.ModuleList, Tensor], Tensor]


def straight(layers: nn.ModuleList, x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x.square().mean()


def one_more_use(layers: nn.ModuleList, x: Tensor) -> Tensor:
    hidden = layers[0](x)
    return (layers[2](layers[1](hidden)) + hidden.sin()).square().mean()


def two_of_three(layers: nn.ModuleList, x: Tensor) -> Tensor:
    result: Tensor = layers[1](layers[0](x)).square().mean()
    return result


def run(uses: list[Use], device: torch.device, *, graphs: bool) -> tuple[list[Tensor], CaptureReport | None]:
    torch.manual_seed(5)
    model = nn.Module()
    model.layers = nn.ModuleList([Block(), Mlp(), Mlp()])
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trace: list[Tensor] = []

    def steps() -> None:
        for number, use in enumerate(uses):
            x = inputs(device, number).requires_grad_()
            optimizer.zero_grad()
            use(model.layers, x).backward()
            trace.extend(p.grad.clone() for p in (x, *model.parameters()) if p.grad is not None)
            optimizer.step()

    if not graphs:
        steps()
        return trace, None
    with attached(model, LAYERS, merge_layers=0) as manager:
        steps()
        return trace, manager.report()


@pytest.mark.parametrize(
    ("use", "num_layers", "detail"),
    [
        (one_more_use, 3, "result of layers.0 is used by others than the next layer of its graph"),
        (two_of_three, 2, "layers.1 is in a graph with layers after it that have no part in the backward"),
    ],
)
def test_the_report_has_each_layer_that_ran_again(device: torch.device, use: Use, num_layers: int, detail: str) -> None:
    uses = [straight, straight, use, straight, use]
    expected, _ = run(uses, device, graphs=False)
    found, report = run(uses, device, graphs=True)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))
    assert report is not None
    rows = report.rows
    again = [row.eager_calls[EagerReason.PARTIAL_BACKWARD] for row in rows]
    assert again == [2] * num_layers + [0] * (3 - num_layers)
    assert [row.last_detail for row in rows] == [detail] * num_layers + [""] * (3 - num_layers)
    assert f"2 computed again in the backward (last: {detail})" in " ".join(str(report).split())


def test_whole_uses_are_not_counted(device: torch.device) -> None:
    _, report = run([straight] * 4, device, graphs=True)
    assert report is not None
    assert sum(row.num_launches for row in report.rows) == 3 * 2
    assert not any(row.eager_calls[EagerReason.PARTIAL_BACKWARD] for row in report.rows)
