"""Reports name callables by class and number, and modules of a model by their paths where it is given."""

from __future__ import annotations

import gc
import json
import pickle
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import graphstep


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))

    def encode(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.towers = nn.ModuleDict({"left": nn.ModuleList([Block(), Block()])})
        self.last = nn.Linear(8, 2)


def graphed(callables: tuple[object, ...]) -> graphstep.CaptureReport:
    sample = torch.randn(4, 8, requires_grad=True)
    made = graphstep.make_graphed_callables(callables, ((sample,),) * len(callables))
    x = sample
    for each in made:
        x = each(x)
    x.sum().backward()
    report = getattr(made[0], "forward", made[0]).report()
    assert isinstance(report, graphstep.CaptureReport)
    return report


def names_of(report: graphstep.CaptureReport) -> list[str]:
    return [row.name for row in report.rows]


def test_functions_and_modules_are_named() -> None:
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    block = Block()
    report = graphed((block, block.encode, partial(block.encode), twice))
    assert names_of(report) == [
        "callables[0] (Block)",
        "callables[1] (encode of Block)",
        "callables[2] (encode of Block)",
        "callables[3] (twice)",
    ]


def test_modules_of_a_model_get_their_paths() -> None:
    model, other = Model(), Block()
    report = graphed((*model.towers["left"], other, other.encode))
    named = report.named_after(model)
    paths = ["towers.left.0", "towers.left.1", "callables[2] (Block)", "callables[3] (encode of Block)"]
    assert names_of(named) == paths
    assert [row.num_replays for row in named.rows] == [row.num_replays for row in report.rows] == [1] * 4
    assert "towers.left.0" in str(named)
    assert "towers.left.0" not in str(report)


def test_a_page_colours_them_in_the_tree(tmp_path: Path) -> None:
    model = Model()
    report = graphed(tuple(model.towers["left"]))
    report.write_html(tmp_path / "report.json", model=model)
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["innermost"] == {"captured": 2, "partly": 0, "eager": 2}
    assert [each["path"] for each in document["tree"]["children"]] == ["first", "towers", "last"]
    first, towers, _ = document["tree"]["children"]
    assert first["why"] == "no graph was asked for here"
    assert towers["coverage"] == "captured"
    assert towers["children"][0]["children"][1]["why"] == "in the graphs of towers.left.1"


def test_a_report_keeps_no_module_alive_and_can_be_sent() -> None:
    model = Model()
    report = graphed((model.towers["left"][0],))
    sent = pickle.loads(pickle.dumps(report))
    assert names_of(sent.named_after(model)) == ["callables[0] (Block)"]
    assert names_of(report.named_after(model)) == ["towers.left.0"]
    reference = report.rows[0].module
    assert reference is not None
    model.towers["left"][0].forward.reset()
    del model
    gc.collect()
    assert reference() is None
    assert names_of(report.named_after(Model())) == ["callables[0] (Block)"]
