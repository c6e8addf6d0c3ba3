"""Layers with experts train as without graphs: counters, losses, biases and gradients to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from tests.models.tiny import seeded
from tests.strategies.attach.attached import Loop, schedule, twins
from tests.strategies.moe_models import (
    BALANCING,
    DISPATCH,
    DROPLESS,
    SHARED,
    WIDE,
    experts_model,
    routed_model,
    tied_model,
)
from torch import nn

import graphstep
from graphstep.config import CudaGraphConfig
from graphstep.errors import CaptureError
from graphstep.models import initialize_weights
from graphstep.models.initialization import WeightInitializer
from graphstep.models.layers import build_layers
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
    def exists(dispatch: str, balancing: str, modules: tuple[str, ...]) -> bool:
        is_capturable = dispatch in STATIC or modules not in (("moe",), ())
        return is_capturable and not ("drop" in dispatch.split() and balancing == "sinkhorn")

    return [(d, s, b, m) for d, s, b, m in product(DISPATCH, SHARED, BALANCING, MODULES) if exists(d, b, m)]


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


@pytest.mark.parametrize("tie", ["counters", "router", "layer"])
@pytest.mark.parametrize("dispatch", STATIC)
@pytest.mark.parametrize("modules", [PARTIAL, ()], ids=lambda each: "+".join(each) or "layers")
def test_tied_counters(device: torch.device, modules: Any, dispatch: str, tie: str) -> None:
    """Several layers count tokens and losses, and move a bias, in the same memory."""
    moe = replace(DISPATCH[dispatch], **BALANCING["bias"], moe_z_loss_coeff=0.01)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    config = {"modules": modules, "merge_layers": 0}
    loop = twins(device, partial(train, num_steps=3), build=partial(tied_model, tie, moe), dtype=dtype, config=config)
    assert loop.num_replays == (6 if modules else 3) * 2 * 2
    assert set(loop.reasons()) == {"observed", "evaluation"}


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


@pytest.mark.parametrize("modules", [("attn",), PARTIAL], ids="+".join)
def test_evaluation_with_gradients_between_the_steps(device: torch.device, modules: Any) -> None:
    """The call after a step captures; what the layers hold is in evaluation mode then, and was not in the step."""

    def script(loop: Loop) -> None:
        for _ in range(4):
            loop.step(1)
            loop.model.eval()
            batch = {name: value.to(loop.device) for name, value in loop.batch().items()}
            loss = loop.model(batch["tokens"], batch["labels"])
            loss.backward()
            loop.model.train()
            loop.note(loss.detach().clone())

    build = partial(experts_model, replace(DROPLESS, **BALANCING["aux_loss"]))
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    loop = twins(device, script, build=build, dtype=dtype, config={"modules": modules})
    assert loop.num_replays == (3 if modules == ("attn",) else 6) * 3


def test_layers_by_themselves(device: torch.device) -> None:
    """Nobody has registered the scale of their losses."""
    config = replace(WIDE, num_layers=2, position_embedding_type="none")
    moe = replace(
        DROPLESS, moe_expert_capacity_factor=1.0, moe_pad_expert_input_to_capacity=True, moe_aux_loss_coeff=0.1
    )
    results = []
    for graphs in (False, True):
        layers = nn.Sequential(*build_layers(config, moe=moe, device=device))
        initialize_weights(layers, WeightInitializer(std=0.2, num_layers=2, generator=seeded()))
        options = CudaGraphConfig(impl="local", modules=PARTIAL)
        manager = graphstep.attach(layers, options) if graphs else None
        for _ in range(4):
            x = torch.linspace(-1, 1, 2 * 6 * 16, device=device).view(2, 6, 16)
            layers(x).square().mean().backward()
            if manager is not None:
                manager.end_step()
        results.append([parameter.grad for parameter in layers.parameters()])
        if manager is not None:
            assert sum(row.num_replays for row in manager.report().rows) == 4 * 3
            manager.close()
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


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
