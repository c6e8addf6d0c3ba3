"""Layers with experts and hybrid ones under a helper: the same bits, in the order of a schedule."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.moe_models import BALANCING, DISPATCH, experts_model
from tests.strategies.toy_moe import MoeDecoder
from tests.strategies.transformer_engine.helped import SCHEDULES, HelpedLoop, twins

from graphstep.models.moe import update_expert_biases

PARTIAL = ("attn", "moe_router", "moe_preprocess")
GRAPHS: dict[tuple[str, ...], tuple[int, int]] = {
    # Regions and graphs of three layers with experts.
    PARTIAL: (6, 4),
    ("attn", "moe_router"): (6, 4),
    ("moe_router",): (6, 6),
    ("attn",): (3, 3),
    ("moe",): (3, 3),
    (): (3, 3),
}


def train(loop: HelpedLoop) -> None:
    for _ in range(4):
        loop.step()
        update_expert_biases(loop.model, 1e-2)
        loop.evaluate(1)


@pytest.mark.parametrize("schedule", ["no pipelining", "1F1B"])
@pytest.mark.parametrize("modules", GRAPHS, ids=lambda modules: "+".join(modules) or "layers")
def test_modules(device: torch.device, modules: Any, schedule: str) -> None:
    build = partial(experts_model, replace(DISPATCH["drop and pad"], **BALANCING["aux_loss"]))
    loop = twins(device, train, SCHEDULES[schedule], build=build, config={"modules": modules})
    num_regions, num_graphs = GRAPHS[modules]
    num_microbatches = SCHEDULES[schedule].num_microbatches
    assert loop.num_replays == num_regions * 3 * num_microbatches
    assert sum(row.num_launches for row in loop.report.rows) == 2 * num_graphs * 3 * num_microbatches


@pytest.mark.parametrize("dispatch", ["dropless", "one by one"])
def test_experts_of_dynamic_shapes_stay_eager(device: torch.device, dispatch: str) -> None:
    build = partial(experts_model, replace(DISPATCH[dispatch], **BALANCING["bias"]))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    loop = twins(device, train, SCHEDULES["1F1B"], build=build, dtype=dtype, config={"modules": PARTIAL})
    assert [part.name for part in loop.report.eager_parts] == [f"layers.{number}.experts" for number in range(3)]


def test_two_chunks(device: torch.device) -> None:
    loop = twins(
        device,
        lambda loop: [loop.step() for _ in range(4)],
        SCHEDULES["interleaved"],
        build=partial(MoeDecoder, "EEE"),
        config={"modules": PARTIAL},
    )
    # Nothing is launched across chunks: the first one has one layer, the other one two.
    assert sum(row.num_launches for row in loop.report.rows) == 2 * (2 + 3) * 3 * 4


@pytest.mark.parametrize("schedule", ["no pipelining", "1F1B"])
def test_a_hybrid_model(device: torch.device, schedule: str) -> None:
    modules = ("mamba", "attn", "moe_router", "moe_preprocess")
    build = partial(experts_model, DISPATCH["drop and pad"], "M*-eM")
    loop = twins(device, train, SCHEDULES[schedule], build=build, config={"modules": modules})
    assert loop.num_replays == 5 * 3 * SCHEDULES[schedule].num_microbatches
