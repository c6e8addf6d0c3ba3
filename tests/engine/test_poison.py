"""Memory that a replay has to write first is overwritten; what somebody holds is not."""

from __future__ import annotations

import torch
from torch import nn

from graphstep.engine import Engine
from graphstep.engine.poison import leave_dirty_memory, poison, poison_free_memory


def test_a_replay_that_reads_before_it_writes_shows_it(engine: Engine) -> None:
    x = torch.ones(64, device=engine.device)

    def reads_what_nobody_wrote() -> torch.Tensor:
        scratch = torch.empty(64, device=x.device)
        return x + scratch * 0  # The result must not lie where the scratch lay.

    recording = engine.capture(reads_what_nobody_wrote)
    assert poison_free_memory(engine) > 0
    recording.replay()
    assert recording.result.isnan().all()


def test_replays_stay_as_they_were(engine: Engine) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 4)).to(engine.device)
    x = torch.randn(5, 8, device=engine.device)
    scale = torch.tensor(0.5, device=engine.device)
    gradients = [torch.zeros_like(p) for p in model.parameters()]

    def run() -> torch.Tensor:
        loss = (model(x) * scale).square().mean()
        for home, gradient in zip(gradients, torch.autograd.grad(loss, list(model.parameters())), strict=True):
            home.copy_(gradient)
        return loss.detach()

    recording = engine.capture(run)
    recording.replay()
    expected = [t.clone() for t in (recording.result, *gradients)]
    for _ in range(2):
        poison_free_memory(engine)
        leave_dirty_memory(engine)
        recording.replay()
        assert all(torch.equal(a, b) for a, b in zip(expected, (recording.result, *gradients), strict=True))


def test_what_somebody_holds_is_left_alone(engine: Engine) -> None:
    x = torch.arange(6.0, device=engine.device)
    held: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        inner = x * 2
        held.append(inner[1:3])
        return inner + 1

    recording = engine.capture(run)
    recording.replay()
    poison_free_memory(engine)
    assert recording.result.tolist() == [1, 3, 5, 7, 9, 11]
    assert held[0].tolist() == [2, 4]


def test_closed_recordings_have_nothing_to_poison(engine: Engine) -> None:
    recording = engine.capture(lambda: torch.ones(8, device=engine.device) + 1)
    recording.close()
    if engine.name == "tape":
        assert poison_free_memory(engine) == 0


def test_integers_stay_valid_indices(engine: Engine) -> None:
    numbers = torch.full((3,), 2, device=engine.device)
    values = torch.ones(3, device=engine.device)
    assert poison([numbers, values[1:]]) == numbers.nbytes + values.nbytes
    assert numbers.tolist() == [0, 0, 0]
    assert values.isnan().all()
