"""What ``verify`` takes, what it says, and what it makes memory look like."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.strategies.models import Decoder
from tests.verification import faulty
from tests.verification.ways import WAYS, local
from torch import Tensor, nn

import graphstep
from graphstep.capture.static_inputs import StaticInputs
from graphstep.config import CudaGraphConfig
from graphstep.errors import ConfigError, VerificationError
from graphstep.verification import Part, Tolerance


def plain(device: torch.device) -> faulty.Model:
    torch.manual_seed(0)
    return faulty.Model(faulty.Plain()).to(device)


def test_a_module_is_attached_for_the_time(device: torch.device) -> None:
    model = plain(device)
    report = graphstep.verify(model, faulty.batches(device), regions=faulty.REGIONS)
    assert report.equal
    assert report.target == "Model, captured by CudaGraphManager"
    assert "forward" not in model.first.__dict__
    decoder = Decoder(dropout=0.1).to(device)
    tokens = [torch.randint(0, 13, (2, 5), device=device) for _ in range(2)]
    batches = [{"tokens": each[:, :-1], "labels": each[:, 1:]} for each in tokens]
    assert graphstep.verify(decoder, batches, config=CudaGraphConfig(impl="local", modules=("attn",))).equal


class Named(nn.Module):
    """Gives its loss a name, as models of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = faulty.Model(faulty.Plain())

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        out = self.inner(x)
        return SimpleNamespace(logits=out, loss=(out.sum(1) - y).square().mean())


def test_the_step_by_default_finds_the_loss(device: torch.device) -> None:
    torch.manual_seed(0)
    model = Named().to(device)
    batches = [(x, x[:, 0].clone()) for x in faulty.batches(device)]
    report = graphstep.verify(model, batches, regions={"inner.blocks.*": "layer"})
    assert report.equal
    (results,) = [row for row in report.rows if (row.module, row.part) == ("", Part.FORWARD)]
    assert results.num_tensors == 2


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"batches": []}, "verify-batches"),
        ({"batches": [torch.ones(4, faulty.WIDTH)] * 3}, "verify-batches"),
        ({"num_steps": 0}, "verify-number"),
        ({"warmup_calls": 0}, "verify-number"),
        ({"target": nn.functional.relu}, "verify-target"),
        ({"config": CudaGraphConfig()}, "verify-config"),
    ],
)
def test_arguments_that_do_not_fit(given: dict[str, Any], code: str) -> None:
    device = torch.device("cpu")
    with graphstep.attach(plain(device), regions=faulty.REGIONS) as manager:
        arguments = {"target": manager, "batches": faulty.batches(device)} | given
        with pytest.raises(ConfigError) as error:
            graphstep.verify(**arguments)
        assert [problem.code for problem in error.value.problems] == [code]


def test_a_captured_module_asks_for_its_manager() -> None:
    model = plain(torch.device("cpu"))
    with graphstep.attach(model, regions=faulty.REGIONS), pytest.raises(ConfigError, match="captured by a manager"):
        graphstep.verify(model.first, faulty.batches(torch.device("cpu")))


def test_several_callables_ask_for_a_step(device: torch.device) -> None:
    with WAYS["callables"](plain(device), device) as (graphed, batches, _):
        with pytest.raises(ConfigError, match="nothing says how a step calls them"):
            graphstep.verify(graphed, batches)
        report = graphstep.verify(graphed[0], [batch.requires_grad_() for batch in batches])
        assert report.equal
        assert report.num_replays == 3
        (gradient,) = [row for row in report.rows if (row.module, row.part) == ("", Part.GRADIENT)]
        assert gradient.num_tensors == 1
        assert all(batch.grad is None for batch in batches)


def test_the_gradient_of_a_batch_is_compared(device: torch.device) -> None:
    model = faulty.Model(faulty.Plain()).to(device)
    model.first = faulty.WrongInputGradient().to(device)
    batches = [batch.requires_grad_() for batch in faulty.batches(device)]
    report = graphstep.verify(model, batches, regions=faulty.REGIONS)
    assert report.first is not None
    assert (report.first.module, report.first.part) == ("first", Part.GRADIENT)


class Segmented(nn.Module):
    """Layers that list their segments, for a strategy that looks for those."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Decoder(dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[:, :5].abs().mul(4).long().clamp(max=12)
        return self.inner(tokens[:, :-1], tokens[:, 1:])


def test_local_graphs_are_steps_of_microbatches(device: torch.device) -> None:
    torch.manual_seed(0)
    with local(Segmented().to(device), device) as (strategy, batches, _):
        report = graphstep.verify(strategy, batches)
    assert report.equal, str(report)
    assert report.num_replays == 3 * 2 * 2


def test_whole_steps_take_no_other_step(device: torch.device) -> None:
    with (
        WAYS["graph_step"](plain(device), device) as (step, batches, _),
        pytest.raises(ConfigError, match="whole step by itself"),
    ):
        graphstep.verify(step, batches, lambda batch: batch)


def test_nothing_replayed_is_no_proof() -> None:
    device = torch.device("cpu")
    model = plain(device).eval()
    with graphstep.attach(model, regions=faulty.REGIONS) as manager, torch.no_grad():
        report = graphstep.verify(manager, faulty.batches(device), model, warmup_calls=1)
    assert not report.differences
    assert not report.equal
    assert "nothing is proved" in report.summary()
    assert "still captures, or does not replay" in report.notes[0]
    with pytest.raises(VerificationError, match="no step was replayed"):
        report.raise_if_different()


def test_a_tolerance_allows_differences(device: torch.device) -> None:
    with WAYS["attach"](faulty.Model(faulty.Counting()).to(device), device) as (manager, batches, _):
        report = graphstep.verify(manager, batches, rtol=1e6, atol=1e6, num_steps=1)
    assert report.equal
    assert report.within
    assert "within the tolerance (rtol 1e+06, atol 1e+06)" in report.summary()
    assert "(allowed)" in str(report)


def test_a_tolerance_of_one_module_is_its_own(device: torch.device) -> None:
    model = faulty.Model(faulty.WrongWeightGradient()).to(device)
    wide = {"blocks.1": Tolerance(atol=1e9)}
    with WAYS["attach"](model, device) as (manager, batches, _):
        assert graphstep.verify(manager, batches, tolerances=wide).equal
        assert not graphstep.verify(manager, batches, tolerances={"blocks.0": Tolerance(atol=1e9)}).equal


def test_the_report_as_plain_data(device: torch.device) -> None:
    with WAYS["attach"](faulty.Model(faulty.DriftingBuffer()).to(device), device) as (manager, batches, _):
        report = graphstep.verify(manager, batches)
    found = json.loads(json.dumps(report.to_json()))
    assert (found["is_equal"], found["num_steps"], found["engine"]) == (False, 1, manager.session.engine.name)
    assert (found["first"]["module"], found["first"]["part"]) == ("blocks.1", "buffer")
    assert found["first"]["difference"]["index"] == [1]
    rows = {(row["module"], row["part"]): row["is_equal"] for row in found["rows"]}
    assert rows["blocks.1", "buffer"] is False
    assert rows["blocks.0", "buffer"] is True
    text = str(report)
    assert "DIFFERENT" in text
    assert "seen[1]" in text


def test_without_bisection_there_are_rows_only(device: torch.device) -> None:
    with WAYS["attach"](faulty.Model(faulty.Counting()).to(device), device) as (manager, batches, _):
        report = graphstep.verify(manager, batches, bisected=False)
    assert report.first is None
    assert report.differences


@pytest.mark.parametrize("poisoned", [False, True])
def test_an_input_that_is_not_refreshed(poisoned: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph reads what the capture left there, or NaN where that was overwritten."""
    load = StaticInputs.load_tensors
    with WAYS["graph_step"](plain(device), device) as (step, batches, _):
        recordings = step.session

        def forgets(self: StaticInputs, tensors: Sequence[Tensor]) -> None:
            if not recordings.report().num_recordings:
                load(self, tensors)

        monkeypatch.setattr(StaticInputs, "load_tensors", forgets)
        report = graphstep.verify(step, batches, poisoned=poisoned, bisected=False)
    (results,) = [row for row in report.differences if (row.module, row.part) == ("", Part.FORWARD)]
    assert results.difference is not None
    assert (results.difference.replayed == "nan") is poisoned


class OwnGenerator(faulty.Plain):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.places = {"a": {"b": {"c": {"d": {"generator": torch.Generator().manual_seed(1)}}}}}

    def forward(self, x: Tensor) -> Tensor:
        generator = self.places["a"]["b"]["c"]["d"]["generator"]
        return super().forward(x) * (torch.rand(faulty.WIDTH, generator=generator) + 0.5)


def test_named_generators_are_compared_and_put_back() -> None:
    device = torch.device("cpu")
    model = faulty.Model(OwnGenerator())
    generator = model.blocks[1].places["a"]["b"]["c"]["d"]["generator"]
    before = generator.get_state()
    with WAYS["graph_step"](model, device) as (step, batches, _):
        report = graphstep.verify(step, batches)
    assert report.equal, str(report)
    (row,) = [row for row in report.rows if row.part is Part.RANDOM]
    assert row.num_tensors == 4
    assert torch.equal(generator.get_state(), before)


class WritesElsewhere(faulty.Plain):
    """Counts in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.detach().sum()
        return super().forward(x)


def test_tensors_that_no_module_registers_are_compared_and_put_back() -> None:
    model = faulty.Model(WritesElsewhere())
    with WAYS["attach"](model, torch.device("cpu")) as (manager, batches, _):
        report = graphstep.verify(manager, batches)
    assert report.equal
    assert [(row.module, row.num_tensors) for row in report.rows if row.part is Part.OTHER] == [("blocks.1", 1)]
    assert model.blocks[1].total == 0
