"""Hybrid models of Mamba, attention, MLP and expert layers: every choice of modules, to the last bit."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.attached import schedule, twins
from tests.strategies.attach.test_moe import train
from tests.strategies.moe_models import DISPATCH, experts_model

PATTERN = "M*-eM"
CASES: dict[tuple[str, ...], tuple[int, int]] = {
    # Regions, and graphs in each half: the end of an expert layer is launched with a captured Mamba layer behind it.
    (): (5, 5),
    ("mamba",): (2, 2),
    ("attn", "mlp"): (2, 2),
    ("mamba", "attn", "moe_router", "moe_preprocess"): (5, 4),
    ("mamba", "attn", "mlp", "moe_router", "moe_preprocess"): (6, 5),
    ("moe", "mlp"): (2, 2),
}


@pytest.mark.parametrize(("order", "dtype"), [("fbfb", torch.float32), ("ffbb", torch.bfloat16)], ids=["fbfb", "ffbb"])
@pytest.mark.parametrize("modules", CASES, ids=lambda modules: "+".join(modules) or "layers")
def test_modules(device: torch.device, modules: Any, order: str, dtype: torch.dtype) -> None:
    """In bfloat16 the rotary tables are made anew in each forward: copied once for what is launched together."""
    build = partial(experts_model, DISPATCH["drop and pad"], PATTERN)
    loop = twins(device, train, build=build, dtype=dtype, config={"modules": modules}, schedule=schedule(order))
    num_regions, num_graphs = CASES[modules]
    assert loop.num_replays == num_regions * 3 * 2
    assert sum(row.num_launches for row in loop.report.rows) == 2 * num_graphs * 3 * 2
