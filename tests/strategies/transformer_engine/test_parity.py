"""A model with a helper trains as the same model without graphs: the same bits in everything that a step leaves."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.attached import WITH_DROPOUT, Frozen, RecomputedLayers, RecomputedMlp, TiedWeights
from tests.strategies.models import Decoder
from tests.strategies.transformer_engine.helped import SCHEDULES, HelpedLoop, twins
from torch import nn

from graphstep.capture.reasons import EagerReason
from graphstep.errors import CaptureError

KINDS: dict[str, Callable[[], nn.Module]] = {
    "dense": Decoder,
    "dropout": WITH_DROPOUT,
    "recompute inside": partial(Decoder, layer=RecomputedMlp),
    "frozen": Frozen,
    "tied": TiedWeights,
}


def train(loop: HelpedLoop) -> None:
    for _ in range(6):
        loop.step()


def train_and_evaluate(loop: HelpedLoop) -> None:
    for _ in range(6):
        loop.step()
        loop.evaluate(2)


def train_and_resume(loop: HelpedLoop) -> None:
    for _ in range(3):
        loop.step()
    loop.resume()
    for _ in range(6):
        loop.step()


SCRIPTS: dict[str, Callable[[HelpedLoop], None]] = {
    "train": train,
    "evaluate": train_and_evaluate,
    "resume": train_and_resume,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("kind", KINDS)
def test_matrix(device: torch.device, kind: str, schedule: str, script: str, dtype: torch.dtype) -> None:
    loop = twins(device, SCRIPTS[script], SCHEDULES[schedule], build=KINDS[kind], dtype=dtype)
    num_steps = {"train": [5], "evaluate": [5], "resume": [2, 5]}[script]
    assert len(loop.closed_reports) == len(num_steps)
    for report, number in zip(loop.closed_reports, num_steps, strict=True):
        # Every training call after the first step is a replay.
        assert [row.num_replays for row in report.rows] == [number * SCHEDULES[schedule].num_microbatches] * len(
            loop.model.layers
        )
        eager = {reason for row in report.rows for reason in row.eager_calls}
        assert eager <= {EagerReason.OBSERVED, EagerReason.EVALUATION}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("zero", ["zeros", "none", "buffers"])
def test_gradients_however_they_are_zeroed(device: torch.device, zero: str, schedule: str) -> None:
    twins(device, train, SCHEDULES[schedule], build=WITH_DROPOUT, zero=zero)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_autocast(device: torch.device, schedule: str) -> None:
    twins(device, train, SCHEDULES[schedule], build=WITH_DROPOUT, autocast=torch.bfloat16)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("merge_layers", [0, 2])
def test_merged_layers(device: torch.device, merge_layers: int, schedule: str) -> None:
    build: Any = partial(Decoder, 4)
    loop = twins(device, train, SCHEDULES[schedule], build=build, config={"merge_layers": merge_layers})
    assert loop.num_replays == 4 * 5 * SCHEDULES[schedule].num_microbatches


def test_recompute_around_layers_is_refused_at_the_first_call(device: torch.device) -> None:
    loop = HelpedLoop(device, True, SCHEDULES["no pipelining"], build=RecomputedLayers)
    with pytest.raises(CaptureError, match="activation recompute"):
        loop.step()
    loop.close()
    gc.collect()  # Torch takes its hooks off when the frames of the error are gone.


def evaluate_with_gradients(loop: HelpedLoop) -> None:
    for _ in range(4):
        loop.step()
        loop.model.eval()
        chunks = loop.manager.helper._graphs._chunks if loop.manager is not None else ()
        for chunk in chunks:
            chunk.eval()
        batch = {name: tensor.to(loop.device) for name, tensor in loop.batch().items()}
        loop.kept.append(loop.model(batch["tokens"], batch["labels"]).detach())
        for module in (loop.model, *chunks):
            module.train()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_evaluation_with_gradients_takes_no_turn(device: torch.device, schedule: str) -> None:
    loop = twins(device, evaluate_with_gradients, SCHEDULES[schedule], build=WITH_DROPOUT)
    assert loop.num_replays == 2 * 3 * SCHEDULES[schedule].num_microbatches
