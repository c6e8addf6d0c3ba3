"""An attached model trains as the same model without graphs: the same bits in everything that a step leaves."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.attached import (
    WITH_DROPOUT,
    Frozen,
    Loop,
    RecomputedLayers,
    RecomputedMlp,
    TiedWeights,
    schedule,
    twins,
)
from tests.strategies.models import Decoder
from tests.strategies.runs import steps
from torch import nn

from graphstep.capture.reasons import EagerReason

KINDS: dict[str, Callable[[], nn.Module]] = {
    "dense": Decoder,
    "dropout": WITH_DROPOUT,
    "recompute inside": partial(Decoder, layer=RecomputedMlp),
    "recompute around": RecomputedLayers,
    "frozen": Frozen,
    "tied": TiedWeights,
}
ORDERS = {"one by one": "fbfbfb", "all forward all backward": "fffbbb", "1F1B": "ffbfbb"}


def train(loop: Loop) -> None:
    steps(5, 3)(loop)


def train_and_evaluate(loop: Loop) -> None:
    for _ in range(5):
        loop.step(3)
        loop.evaluate(2)


def train_and_resume(loop: Loop) -> None:
    steps(3, 3)(loop)
    loop.resume()
    steps(4, 3)(loop)


SCRIPTS = {"train": train, "evaluate": train_and_evaluate, "resume": train_and_resume}


@pytest.mark.filterwarnings("ignore:.*activation recompute")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_matrix(device: torch.device, kind: str, order: str, script: str, dtype: torch.dtype) -> None:
    build = KINDS[kind]
    config = {"policy": "auto" if kind == "recompute around" else "required"}
    loop = twins(device, SCRIPTS[script], build=build, dtype=dtype, config=config, schedule=schedule(ORDERS[order]))
    num_layers = len(loop.model.layers)
    for report in loop.closed_reports:
        assert report.num_recordings > 0 or kind == "recompute around"
    if kind == "recompute around" and not loop.num_replays:
        assert EagerReason.RECOMPUTE in loop.reasons()
        return
    num_steps = 4 if script != "resume" else 3
    assert loop.num_replays >= num_layers * num_steps * 3


@pytest.mark.parametrize("modules", [("attn",), ("mlp",), ("attn", "mlp")], ids=" ".join)
@pytest.mark.parametrize("order", ORDERS)
def test_parts_of_layers(device: torch.device, order: str, modules: Any) -> None:
    loop = twins(device, steps(5, 3), build=WITH_DROPOUT, config={"modules": modules}, schedule=schedule(ORDERS[order]))
    assert loop.num_replays == 2 * 4 * 3
    assert {row.kind for row in loop.report.rows} == {"layer" if len(modules) == 2 else modules[0]}


@pytest.mark.parametrize("zero", ["zeros", "none", "buffers"])
@pytest.mark.parametrize("ends_steps", [False, True])
def test_gradients_and_the_end_of_the_step(device: torch.device, zero: str, ends_steps: bool) -> None:
    loop = twins(device, steps(6, 2), build=WITH_DROPOUT, zero=zero, ends_steps=ends_steps)
    assert loop.num_replays == 2 * 5 * 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(device: torch.device, dtype: torch.dtype) -> None:
    loop = twins(device, steps(6, 2), build=WITH_DROPOUT, autocast=dtype)
    assert loop.num_replays == 2 * 5 * 2


@pytest.mark.parametrize("build", [Decoder, WITH_DROPOUT, TiedWeights])
def test_a_checkpoint_loaded_between_steps(device: torch.device, build: Any) -> None:
    def script(loop: Loop) -> None:
        steps(3, 2)(loop)
        saved = {name: value.clone() for name, value in loop.model.state_dict().items()}
        steps(2, 2)(loop)
        loop.model.load_state_dict(saved)
        steps(2, 2)(loop)

    assert twins(device, script, build=build).num_replays == 2 * 6 * 2


def test_evaluation_at_every_place(device: torch.device) -> None:
    """Before the first step, between the first two, under each mode, and inside of an accumulation."""

    def script(loop: Loop) -> None:
        loop.evaluate(2)
        for step in range(5):
            loop.optimizer.zero_grad()
            loop.note(loop.forward_backward([loop.batch()]))
            loop.evaluate(1)
            with torch.inference_mode():
                loop.evaluate(1, length=4)
            loop.note(loop.forward_backward([loop.batch()]))
            if step == 3:
                loop.model.train()
            loop.optimizer.step()

    assert twins(device, script, build=WITH_DROPOUT).num_replays >= 2 * 3 * 2


def test_what_training_leaves_without_a_manager(device: torch.device) -> None:
    """A closed manager has left no trace: training goes on as if it had never been there."""

    def script(loop: Loop) -> None:
        steps(3, 2)(loop)
        if loop.manager is not None:
            assert loop.num_replays > 0
            loop.close()
        steps(3, 2)(loop)

    loops = [Loop(device, graphs, build=WITH_DROPOUT) for graphs in (False, True)]
    for loop in loops:
        torch.manual_seed(3)
        script(loop)
    assert all(torch.equal(*pair) for pair in zip(*(loop.model.parameters() for loop in loops), strict=True))
