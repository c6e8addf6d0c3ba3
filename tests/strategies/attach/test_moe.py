"""Layers with experts train as without graphs: counters, losses, biases and gradients to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from typing import Any

import pytest
import torch
from tests.strategies.attach.attached import Loop, schedule, twins
from tests.strategies.moe_models import BALANCING, DISPATCH, DROPLESS, SHARED, experts_model, routed_model

from graphstep.errors import CaptureError
from graphstep.models.moe import read_and_reset_losses, update_expert_biases

PARTIAL = ("attn", "moe_router", "moe_preprocess")
MODULES = [PARTIAL, ("moe_router",), ("attn",), ("moe",), ()]
STATIC = ("dropless", "drop", "drop and pad")
"""What is captured as a whole: nothing is read on the host. On a GPU, dropless in bfloat16."""


def train(loop: Loop, num_steps: int = 4) -> None:
    """Steps as the training loop runs them, with evaluation in between."""
    for _ in range(num_steps):
        loop.step(2)
        update_expert_biases(loop.model, 1e-2)
        loop.evaluate(1)
    for value in read_and_reset_losses(loop.model).values():
        loop.kept.append(value)
    loop.note(torch.zeros(1))


def _cases() -> list[Any]:
    others = cycle(product(SHARED, BALANCING))
    pairs = [(d, m) for d, m in product(DISPATCH, MODULES) if d in STATIC or m not in (("moe",), ())]
    found = [(d, *next(others), m) for d, m in pairs]
    found += [("dropless", s, b, PARTIAL) for s, b in product(SHARED, BALANCING)]
    # No configuration has these two.
    return [each for each in found if not ("drop" in each[0].split() and each[2] == "sinkhorn")]


@pytest.mark.parametrize(
    ("dispatch", "shared", "balancing", "modules"),
    _cases(),
    ids=lambda each: each if isinstance(each, str) else "+".join(each) or "layers",
)
def test_matrix(device: torch.device, dispatch: str, shared: str, balancing: str, modules: Any) -> None:
    moe = replace(DISPATCH[dispatch], **SHARED[shared], **BALANCING[balancing])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    build = partial(experts_model, moe)
    loop = twins(device, train, build=build, dtype=dtype, config={"modules": modules}, schedule=schedule("ffbb"))
    num_regions = {PARTIAL: 2, ("moe_router",): 2}.get(modules, 1) * 3
    assert loop.num_replays == num_regions * 3 * 2
    assert set(loop.reasons()) == {"observed", "evaluation"}


@pytest.mark.parametrize("favour", ["one", "never the last", "ties"])
@pytest.mark.parametrize("dispatch", STATIC)
@pytest.mark.parametrize("modules", [PARTIAL, ("moe",)], ids="+".join)
def test_adversarial_routing(device: torch.device, modules: Any, dispatch: str, favour: str) -> None:
    """All tokens to one expert, an expert with none, and scores that are all the same."""
    build = partial(routed_model, favour, DISPATCH[dispatch])
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    loop = twins(device, partial(train, num_steps=3), build=build, dtype=dtype, config={"modules": modules})
    assert loop.num_replays > 0


LAUNCHES: dict[str, tuple[Callable[[], Any], tuple[str, ...], int]] = {
    # attention+router+preprocess, then [postprocess + attention+router+preprocess] twice, then postprocess
    "experts": (partial(experts_model, DROPLESS, "EEE"), PARTIAL, 4),
    "experts alone": (partial(experts_model, DROPLESS, "eee"), ("moe_router",), 4),
    # attention eager: nothing follows a postprocess directly
    "router": (partial(experts_model, DROPLESS, "EEE"), ("moe_router",), 6),
    # E, [E's end + attention of D], eager MLP, E, its end
    "mixed": (partial(experts_model, DROPLESS, "EDE"), PARTIAL, 4),
    # E, [E's end + D], E, its end
    "mixed, and whole dense layers": (partial(experts_model, DROPLESS, "EDE"), (*PARTIAL, "mlp"), 4),
}


@pytest.mark.parametrize("balancing", ["none", "aux_loss"])
@pytest.mark.parametrize("name", LAUNCHES)
def test_the_end_of_a_layer_is_launched_with_the_next_one(device: torch.device, name: str, balancing: str) -> None:
    """One launch in the forward and one in the backward, with counters and without, whatever ``merge_layers`` is."""
    build, modules, num_graphs = LAUNCHES[name]
    moe = replace(DROPLESS, **BALANCING[balancing])
    letters = build.args[1]  # type: ignore[attr-defined]

    def script(loop: Loop) -> None:
        for _ in range(4):
            loop.step(1)

    loop = twins(device, script, build=partial(experts_model, moe, letters), config={"modules": modules})
    assert sum(row.num_launches for row in loop.report.rows) == 2 * num_graphs * 3
    assert sum(row.num_recordings for row in loop.report.rows) == 2 * num_graphs


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["required", "auto"])
def test_dropless_experts_in_float32_on_a_gpu(policy: str) -> None:
    """The product of all experts reads on the host there: an error that says so, or eager with the reason."""
    device, config = torch.device("cuda"), {"modules": ("moe",), "policy": policy}
    loop = Loop(device, True, build=experts_model, config=config)
    loop.step(1)
    if policy == "required":
        with pytest.raises(CaptureError, match="grouped matrix product"):
            loop.step(1)
    else:
        with pytest.warns(UserWarning, match="grouped matrix product"):
            loop.step(1)
        assert "--bf16" in str(loop.report) or "bfloat16" in str(loop.report)
        assert loop.num_replays == 0
    loop.close()
