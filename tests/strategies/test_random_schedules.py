"""Jobs drawn at random whose rates, decays and other numbers change at random, with two sizes of batches in turns."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphstep

KINDS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"momentum": 0.9, "maximize": True}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.Adam, {"decoupled_weight_decay": True}),
    (torch.optim.AdamW, {}),
)
NUM_STEPS = 30


def trace(seed: int, device: torch.device, *, is_graphed: bool) -> tuple[list[Tensor], int]:
    """Everything that a loop leaves after each step, and how often a graph was replayed."""
    drawn = random.Random(seed)
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(device)
    kind, options = KINDS[seed % len(KINDS)]
    parameters = list(model.parameters())
    groups = [{"params": parameters[:2]}, {"params": parameters[2:], "weight_decay": 0.25}]
    optimizer = kind(groups, lr=2.0**-6, weight_decay=0.125, fused=True, **options)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8, enabled=drawn.random() < 0.5)
    zeroing, unscales, how_often = drawn.choice(["in", "out", "in place"]), drawn.random() < 0.5, drawn.choice([0.2, 1])
    threshold = torch.tensor(1.0, device=device)

    def step(values: Tensor) -> Tensor:
        if zeroing == "in":
            optimizer.zero_grad()
        loss: Tensor = model(values).square().mean()
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
        graphstep.clip_grad_norm_(parameters, threshold)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    run: Any = graphstep.graph_step(step) if is_graphed else step
    data, found = torch.Generator().manual_seed(seed), []
    for _ in range(NUM_STEPS):
        for group in optimizer.param_groups:
            if drawn.random() < how_often:
                group["weight_decay"] = drawn.choice([0.0, 0.125, 0.25, drawn.random()])
            if drawn.random() < how_often:
                group["lr"] = 2.0 ** -drawn.randint(4, 9)
            if drawn.random() < 0.02:
                group.update({"betas": (0.5, 0.75)} if "betas" in group else {"momentum": 0.5})
        threshold.fill_(drawn.choice([0.03, 0.25, 1.0]))
        if zeroing != "in":
            optimizer.zero_grad(set_to_none=zeroing == "out")
        found.append(run(torch.randn(drawn.choice([4, 6]), 5, generator=data).to(device)))
        found += [each.detach().clone() for p in parameters for each in (p, p.grad) if each is not None]
        found += [v.clone() for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor)]
    replays = 0
    if is_graphed:
        replays = run.report().rows[0].num_replays
        run.close()
    return found, replays


@pytest.mark.filterwarnings("ignore:.*has been captured")
@pytest.mark.parametrize("seed", range(10))
def test_graphs_follow_or_are_captured_anew(device: torch.device, seed: int) -> None:
    expected, _ = trace(seed, device, is_graphed=False)
    found, replays = trace(seed, device, is_graphed=True)
    assert all(map(torch.equal, expected, found))
    assert replays >= NUM_STEPS // 3
