"""``local`` equals eager training bit for bit: every choice of parts, every shape of model, several microbatches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.models.tiny import LLAMA, TINY, tiny_model
from tests.strategies.models import Decoder, Layer, Wrapped
from tests.strategies.runs import Run, compared, steps
from torch import nn

from graphstep.errors import ConfigError

LOCAL = "local"
WITH_DROPOUT = partial(Decoder, dropout=0.2)
PARTS = [(), ("attn",), ("mlp",), ("attn", "mlp"), ("mlp", "attn")]


@pytest.mark.parametrize("modules", PARTS, ids=lambda parts: " ".join(parts) or "layers")
@pytest.mark.parametrize("num_microbatches", [1, 4])
@pytest.mark.parametrize("zero", ["zeros", "none", "buffers"])
def test_training_equals_eager(device: torch.device, modules: Any, num_microbatches: int, zero: str) -> None:
    """The parts that were named are captured, and no others."""
    run = compared(device, LOCAL, steps(5, num_microbatches), build=WITH_DROPOUT, modules=modules, zero=zero)
    num_regions = 2
    assert [row.num_recordings for row in run.report.rows] == [2] * num_regions
    assert run.num_replays == num_regions * 4 * num_microbatches
    assert run.reasons() == {"observed": num_regions * num_microbatches}
    kinds = {row.kind for row in run.report.rows}
    assert kinds == {modules[0] if len(modules) == 1 else "layer"}


@pytest.mark.parametrize("warmup_steps", [0, 1, 3])
def test_warmups_leave_no_trace(device: torch.device, warmup_steps: int) -> None:
    """Counters, means and masks go on as if there had been no warmup."""
    compared(device, LOCAL, steps(4, 2), build=WITH_DROPOUT, warmup_steps=warmup_steps)


@pytest.mark.parametrize("config", [TINY, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("modules", PARTS[:3], ids=lambda parts: " ".join(parts) or "layers")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_model(device: torch.device, config: Any, modules: Any, dtype: torch.dtype) -> None:
    build = lambda: tiny_model(config, dtype=dtype)  # noqa: E731
    run = compared(device, LOCAL, steps(4, 2), build=build, modules=modules, zero="buffers")
    assert run.num_replays == 2 * 3 * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero", ["none", "buffers"])
def test_autocast(device: torch.device, dtype: torch.dtype, zero: str) -> None:
    run = compared(device, LOCAL, steps(4, 2), build=WITH_DROPOUT, autocast=dtype, zero=zero)
    assert run.num_replays == 2 * 3 * 2


def test_autocast_that_comes_later_is_another_signature(device: torch.device) -> None:
    def script(run: Run) -> None:
        for step in range(6):
            run.autocast = torch.bfloat16 if step in (2, 3) else None
            run.step(1)

    run = compared(device, LOCAL, script)
    assert run.reasons() == {"observed": 2, "another signature": 4}
    (row, *_) = run.report.rows
    assert len(row.last_mismatch) >= 1
    assert any("autocast was (False" in text and "is (True" in text for text in row.last_mismatch)
    assert row.last_mismatch[0] in run.report.to_json()["regions"][0]["last_mismatch"]


@pytest.mark.parametrize("context", ["buffer", "expanded", "fresh"])
def test_context(device: torch.device, context: str) -> None:
    """An argument that is made anew each time is copied; a buffer of the model is read where it is."""
    run = compared(device, LOCAL, steps(4, 2), build=partial(Decoder, dropout=0.2, context=context))
    assert run.num_replays == 2 * 3 * 2
    (row, *_) = run.report.rows
    assert row.static_bytes > 0


def test_a_wrapper_around_a_layer_is_looked_into(device: torch.device) -> None:
    build = partial(Decoder, dropout=0.2, layer=lambda p: Wrapped(Wrapped(Layer(p))))
    run = compared(device, LOCAL, steps(4, 2), build=build)
    assert [row.name for row in run.report.rows] == ["layers.0.inner.inner", "layers.1.inner.inner"]
    assert run.num_replays == 2 * 3 * 2


@pytest.mark.parametrize("modules", PARTS[:2], ids=["layers", "attn"])
def test_a_layer_used_several_times_in_one_forward(device: torch.device, modules: Any) -> None:
    """The parts of its gradient are summed as autograd sums them, before they are added to what is there."""
    build = partial(Decoder, dropout=0.2, order=(0, 1, 0, 0))
    run = compared(device, LOCAL, steps(4, 3), build=build, modules=modules)
    assert run.num_replays == 4 * 3 * 3


class Shared(Decoder):
    """Two layers with one weight, which the head uses too."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.layers[1].mix.query.weight = self.layers[0].mix.query.weight
        self.layers[1].mix.out.weight = self.layers[0].mix.query.weight


class SharedWithHead(Decoder):
    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.gain = nn.Module()
        self.gain.weight = self.layers[0].mlp[0].weight
        self.norm.weight = self.layers[0].mlp[0].weight


@pytest.mark.parametrize("build", [Shared, SharedWithHead])
@pytest.mark.parametrize("zero", ["none", "buffers"])
def test_shared_weights(device: torch.device, build: Any, zero: str) -> None:
    run = compared(device, LOCAL, steps(4, 3), build=build, zero=zero)
    assert run.num_replays == 2 * 3 * 3


def freezing(*names: str) -> Callable[[], Decoder]:
    def build() -> Decoder:
        model = WITH_DROPOUT(num_layers=3)
        for name, parameter in model.named_parameters():
            if any(part in name for part in names):
                parameter.requires_grad_(False)
        return model

    return build


def test_frozen_parameters(device: torch.device) -> None:
    run = compared(device, LOCAL, steps(4, 2), build=freezing("query", "layers.1.mlp"))
    assert run.num_replays == 3 * 3 * 2


def test_a_region_without_gradient_runs_eagerly(device: torch.device) -> None:
    """The first layer neither trains nor passes a gradient on."""
    run = compared(device, LOCAL, steps(4, 3), build=freezing("embedding", "layers.0"))
    assert [row.num_recordings for row in run.report.rows] == [0, 2, 2]
    assert run.report.rows[0].eager_calls == {"observed": 3, "no gradient in the first step": 9}
    assert run.num_replays == 2 * 3 * 3


def test_a_frozen_layer_that_passes_a_gradient_on(device: torch.device) -> None:
    run = compared(device, LOCAL, steps(4, 2), build=freezing("layers.1"))
    assert run.num_replays == 3 * 3 * 2


def test_nothing_to_capture_is_an_error() -> None:
    with pytest.raises(ConfigError) as caught:
        Run(torch.device("cpu"), LOCAL, build=partial(Decoder, layer=lambda p: Plain()))
    (problem,) = caught.value.problems
    assert problem.code == "nothing-to-capture"
    assert "0 layers" in problem.what


def test_a_part_that_no_layer_has_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"attn, mlp"):
        Run(torch.device("cpu"), LOCAL, modules=["mamba"])


class Plain(nn.Module):
    pass


def test_the_report_covers_every_region(device: torch.device) -> None:
    run = Run(device, LOCAL, modules=["mlp"])
    run.step(1)
    run.step(1)
    report = run.report
    assert [(row.name, row.kind) for row in report.rows] == [("layers.0.mlp", "mlp"), ("layers.1.mlp", "mlp")]
    assert report.capture_seconds > 0
    assert all(row.num_operations > 0 for row in report.rows)
    run.strategy.close()
    assert run.report.pool_bytes == 0


def test_the_first_region_copies_and_the_others_chain(device: torch.device) -> None:
    """Output i is input i + 1; only the first layer has an input of its own."""
    run = Run(device, LOCAL, build=partial(Decoder, num_layers=4))
    run.step(1)
    assert [row.static_bytes > 0 for row in run.report.rows] == [True, False, False, False]
    run.strategy.close()
