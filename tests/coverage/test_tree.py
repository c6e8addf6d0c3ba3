"""The module tree: what is captured, what is not and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.coverage.documents import Loop, Model
from torch import Tensor, nn

import graphstep
from graphstep.capture.report import CaptureReport, EagerPart, RegionStats
from graphstep.config import CudaGraphConfig, from_argv
from graphstep.coverage import ModuleNode, module_tree
from graphstep.coverage.tree import Coverage
from graphstep.errors import CaptureError
from graphstep.training.loop import Trainer


def nodes_of(tree: ModuleNode) -> dict[str, ModuleNode]:
    return {node.path: node for node in tree.walk()}


def states_of(tree: ModuleNode) -> dict[str, str]:
    return {path: node.coverage.value for path, node in nodes_of(tree).items()}


def captured(name: str, kind: str = "layer") -> RegionStats:
    return RegionStats(name, kind, num_recordings=2, num_operations=9, num_replays=4)


def test_what_lies_in_a_captured_module_is_captured_and_the_rest_is_not() -> None:
    loop = Loop()
    with graphstep.attach(loop.model, regions={"layers.1": "layer"}) as manager:
        for _ in range(3):
            loop()
        tree = module_tree(manager.report().to_json(), loop.model)
    states = states_of(tree)
    assert states["layers.1"] == states["layers.1.up"] == states["layers.1.down"] == "captured"
    assert states["layers.0"] == states["layers.0.up"] == states["head"] == states["first"] == "eager"
    assert states["layers"] == states[""] == "partly"
    nodes = nodes_of(tree)
    assert nodes["layers.1"].region is not None
    assert nodes["layers.1"].region["num_replays"] == 2
    assert nodes["head"].why == "no graph was asked for here"
    assert nodes["layers"].why == "2 of the 6 innermost modules in it are captured"
    assert nodes["layers.1.up"].kind == "Linear"
    assert nodes["layers.1.up"].num_parameters == 8 * 16 + 16
    assert nodes[""].num_parameters == sum(p.numel() for p in loop.model.parameters())


class Reads(nn.Module):
    """Reads a value on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) / max(1.0, x.norm().item())


def test_a_capture_that_failed_and_stopped_the_run_says_why_and_where() -> None:
    model = Model()
    model.layers[1] = Reads()
    loop = Loop(model)
    with graphstep.attach(model, regions={"layers.*": "layer"}) as manager:
        loop()
        with pytest.raises(CaptureError):
            loop()
        nodes = nodes_of(module_tree(manager.report().to_json(), model))
    assert "_local_scalar_dense" in nodes["layers.1"].why
    assert "test_tree.py" in nodes["layers.1"].why
    assert nodes["layers.0"].coverage is Coverage.eager


def test_a_capture_that_failed_says_why_and_where() -> None:
    model = Model()
    model.layers[1] = Reads()
    loop = Loop(model)
    config = CudaGraphConfig(impl="local", policy="auto")
    with graphstep.attach(model, config, regions={"layers.*": "layer"}) as manager:
        loop()
        with pytest.warns(UserWarning, match="runs eagerly"):
            loop()
        nodes = nodes_of(module_tree(manager.report().to_json(), model))
    assert nodes["layers.1"].coverage is nodes["layers.1.inner"].coverage is Coverage.eager
    assert "_local_scalar_dense" in nodes["layers.1"].why
    assert "test_tree.py" in nodes["layers.1"].why
    assert nodes["layers.0"].coverage is Coverage.captured


def test_parts_of_layers_take_their_norms_with_them() -> None:
    config = from_argv(
        [
            *("--num-layers", "2", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "8"),
            *("--micro-batch-size", "2", "--train-iters", "3", "--eval-iters", "0", "--mock-data", "--device", "cpu"),
            *("--cuda-graph-impl", "local", "--cuda-graph-modules", "attn"),
        ]
    )
    with Trainer(config) as trainer:
        report = trainer.train().report
        nodes = nodes_of(module_tree(report.to_json(), trainer.model))
    for layer in ("layers.0", "layers.1"):
        assert nodes[f"{layer}.attention"].coverage is nodes[f"{layer}.attention_norm"].coverage is Coverage.captured
        assert nodes[f"{layer}.mlp"].coverage is nodes[f"{layer}.mlp_norm"].coverage is Coverage.eager
        assert nodes[f"{layer}.mlp"].why == nodes[f"{layer}.mlp_norm"].why == "mlp is not among the modules attn"
        assert nodes[layer].coverage is Coverage.partly


def test_regions_of_several_parts_cover_each_of_them() -> None:
    report = CaptureReport(
        "cuda",
        (captured("layers.0.router+preprocess", "moe_router+moe_preprocess"),),
        0,
        (EagerPart("layers.0.experts", "", "it is never captured by name"),),
    )
    nodes = nodes_of(module_tree(report.to_json()))
    assert nodes["layers.0.router"].coverage is nodes["layers.0.preprocess"].coverage is Coverage.captured
    assert nodes["layers.0.experts"].coverage is Coverage.eager
    assert nodes["layers.0"].coverage is Coverage.partly


def test_a_captured_step_contains_every_module() -> None:
    report = CaptureReport("cuda", (captured("training", "iteration"), RegionStats("validation", "iteration")), 0)
    tree = module_tree(report.to_json(), Model())
    assert set(states_of(tree).values()) == {"captured"}
    why = nodes_of(tree)["head"].why
    assert why == "in the graph of the whole step: training; validation is eager: not called yet"


def test_an_eager_step_says_why_for_every_module() -> None:
    row = RegionStats("training", "iteration")
    row.eager_calls["warmup"] = 3
    tree = module_tree(CaptureReport("cuda", (row,), 0).to_json(), Model())
    assert set(states_of(tree).values()) == {"eager"}
    assert nodes_of(tree)["head"].why == "training is eager: 3 warmup"


def test_nothing_captured_says_so() -> None:
    tree = module_tree(CaptureReport("none", (), 0).to_json(), Model())
    assert {node.why for node in tree.walk()} == {"nothing was captured"}


def test_without_a_model_the_tree_has_the_paths_of_the_report() -> None:
    report = CaptureReport("cuda", (captured("decoder.layers.0"), RegionStats("decoder.layers.1", "layer")), 0)
    states = states_of(module_tree(report.to_json()))
    assert states == {
        "": "partly",
        "decoder": "partly",
        "decoder.layers": "partly",
        "decoder.layers.0": "captured",
        "decoder.layers.1": "eager",
    }


def test_a_module_in_two_places_is_shown_in_both() -> None:
    model = Model(2)
    model.layers[1] = model.layers[0]
    nodes = nodes_of(module_tree(CaptureReport("none", (), 0).to_json(), model))
    assert {"layers.0.up", "layers.1.up"} <= set(nodes)


def test_a_module_in_two_places_is_captured_in_both() -> None:
    model = Model(2)
    model.layers[1] = model.layers[0]
    report = CaptureReport("tape", (captured("layers.0"),), 0)
    states = states_of(module_tree(report.to_json(), model))
    assert states["layers.0"] == states["layers.1"] == states["layers.1.up"] == states["layers"] == "captured"
    assert states["head"] == "eager"


def test_a_graph_of_validation_alone_does_not_make_the_step_captured() -> None:
    training = RegionStats("training", "iteration")
    training.eager_calls["warmup"] = 3
    report = CaptureReport("tape", (training, captured("validation", "iteration")), 0)
    tree = module_tree(report.to_json(), Model())
    assert set(states_of(tree).values()) == {"partly"}
    assert {node.why for node in tree.walk()} == {
        "in the graph of the whole step: validation; training is eager: 3 warmup"
    }


def test_parts_and_the_optimizer_are_not_counted_as_modules() -> None:
    rows = (captured("layers.0"), captured("layers.1.router", "moe_router"), captured("optimizer", "optimizer"))
    tree = module_tree(CaptureReport("tape", rows, 0).to_json(), Model(2))
    assert {node.path for node in tree.innermost()} == {
        *("first", "head", "layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down")
    }
    assert nodes_of(tree)[""].why == "2 of the 6 innermost modules in it are captured"


def test_a_region_that_is_the_whole_model_is_named() -> None:
    tree = module_tree(CaptureReport("tape", (captured(""),), 0).to_json(), Model())
    assert nodes_of(tree)["head"].why == "in the graphs of the whole model"


def test_the_model_is_walked_as_often_for_many_regions_as_for_one() -> None:
    class Counted(Model):
        num_walks = 0

        def named_modules(self, *given: Any, **named: Any) -> Iterator[tuple[str, nn.Module]]:
            self.num_walks += 1
            return super().named_modules(*given, **named)

    walks = []
    for num_regions in (1, 30):
        model = Counted(30)
        rows = tuple(captured(f"layers.{number}") for number in range(num_regions))
        module_tree(CaptureReport("tape", rows, 0).to_json(), model)
        walks.append(model.num_walks)
    assert walks[0] == walks[1] > 0


def test_regions_of_another_model_leave_the_modules_unknown() -> None:
    loop = Loop()
    with graphstep.attach(loop.model, regions={"layers.*": "layer"}) as manager:
        loop()
        report = manager.report().to_json()
    assert nodes_of(module_tree(report, loop.model))["head"].why == "no graph was asked for here"
    above = nodes_of(module_tree(report, nn.Sequential(loop.model)))
    assert above["0.layers.0"].why == "not known: the regions are named by no path of this model"
    rows = (captured("callables[0] (Block)", "callable"), captured("optimizer", "optimizer"))
    callables = nodes_of(module_tree(CaptureReport("tape", rows, 0).to_json(), loop.model))
    assert callables["layers.0"].why == "not known: the regions are named by no path of this model"
    assert callables["callables[0] (Block)"].coverage is Coverage.captured
