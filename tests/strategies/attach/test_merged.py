"""Neighbouring layers that are launched as one graph, and what happens between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.attached import WITH_DROPOUT, Frozen, Loop, RecomputedLayers, TiedWeights, schedule, twins
from tests.strategies.attach.test_parity import ORDERS, train_and_evaluate
from tests.strategies.models import HIDDEN, Decoder
from tests.strategies.runs import steps


@pytest.mark.parametrize("merge_layers", [1, 2, 0])
@pytest.mark.parametrize("order", ORDERS)
def test_merged_layers(device: torch.device, order: str, merge_layers: int) -> None:
    build = partial(Decoder, num_layers=3, dropout=0.2)
    loop = twins(
        device, steps(5, 3), build=build, config={"merge_layers": merge_layers}, schedule=schedule(ORDERS[order])
    )
    assert loop.num_replays > 0


@pytest.mark.filterwarnings("ignore:.*activation recompute")
@pytest.mark.parametrize("merge_layers", [2, 0])
@pytest.mark.parametrize("build", [Frozen, TiedWeights, RecomputedLayers])
def test_merged_layers_of_all_kinds(device: torch.device, build: Any, merge_layers: int) -> None:
    twins(device, train_and_evaluate, build=build, config={"merge_layers": merge_layers, "policy": "auto"})


def test_merged_layers_of_which_one_is_called_alone(device: torch.device) -> None:
    """The state of a layer that is not called does not change: no count, no running mean, no random numbers."""

    def script(loop: Loop) -> None:
        for step in range(6):
            loop.step(1)
            if step in (2, 3):
                x = torch.full((2, 6, HIDDEN), 0.5, device=loop.device, requires_grad=True)
                loop.note(loop.model.layers[0](x).detach().clone())

    assert twins(device, script, build=WITH_DROPOUT, config={"merge_layers": 0}).num_replays > 0


CHANGES: dict[str, Callable[[Decoder], Any]] = {
    "mode": lambda model: model.layers[1].mlp.eval(),
    "attribute": lambda model: setattr(model.layers[1], "dropout", 0.5),
    "hook inside": lambda model: model.layers[1].mix.register_forward_hook(lambda module, args, out: out * 2),
    "argument": lambda model: model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_merged_layers_of_which_a_later_one_changes(device: torch.device, name: str) -> None:
    """Eager for once, as without merging, and never an error in the backward."""

    def script(loop: Loop) -> None:
        for step in range(6):
            if step == 3:
                CHANGES[name](loop.model)
            loop.step(1)

    assert twins(device, script, build=WITH_DROPOUT, config={"merge_layers": 0}).num_replays > 0
