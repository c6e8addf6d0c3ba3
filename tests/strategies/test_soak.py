"""Long runs of everything that happens to a training job, in random order, bit for bit as without graphs."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.models import Decoder, in_order
from tests.strategies.runs import Run, compared

ORDERS = ("fb", "fbfb", "ffbb", "ffBB", "fbffbb", "fffbBb", "ffbfbfbb")


def train(run: Run, dice: random.Random) -> None:
    run.step(dice.choice([1, 2, 2, 3, 4]), length=dice.choice([6, 6, 6, 9]), optimize=dice.random() < 0.9)


def evaluate(run: Run, dice: random.Random) -> None:
    run.evaluate(dice.choice([1, 2]), length=dice.choice([6, 9]))


def save(run: Run, dice: random.Random) -> None:
    run.saved = {name: value.clone() for name, value in run.model.state_dict().items()}  # type: ignore[attr-defined]


def load(run: Run, dice: random.Random) -> None:
    run.model.load_state_dict(getattr(run, "saved", run.model.state_dict()))


def set_learning_rate(run: Run, dice: random.Random) -> None:
    run.optimizer.param_groups[0]["lr"] = dice.choice([1e-3, 1e-2])


def change_dropout(run: Run, dice: random.Random) -> None:
    run.model.layers[dice.randrange(2)].dropout = dice.choice([0.1, 0.3])


def switch_mode_of_a_part(run: Run, dice: random.Random) -> None:
    run.model.layers[dice.randrange(2)].mlp.train(dice.random() < 0.5)


def seed(run: Run, dice: random.Random) -> None:
    torch.manual_seed(dice.randrange(3))


def change_zeroing(run: Run, dice: random.Random) -> None:
    run.zero = dice.choice(["none", "zeros"])


def replace_gradients(run: Run, dice: random.Random) -> None:
    for parameter in run.model.layers[0].parameters():
        parameter.grad = torch.zeros_like(parameter)


def use_autocast(run: Run, dice: random.Random) -> None:
    run.autocast = dice.choice([None, None, torch.bfloat16])


def prune(run: Run, dice: random.Random) -> None:
    with torch.no_grad():
        run.model.layers[1].mix.out.weight.mul_(0.99)


OFTEN: tuple[Callable[[Run, random.Random], None], ...] = (train,) * 12 + (evaluate,) * 3
NOW_AND_THEN = (
    *(save, load, set_learning_rate, change_dropout, switch_mode_of_a_part, seed, change_zeroing, replace_gradients),
    *(use_autocast, prune),
)


def random_job(seed: int, num_actions: int) -> Callable[[Run], None]:
    def script(run: Run) -> None:
        dice = random.Random(seed)
        for _ in range(num_actions):
            dice.choice(OFTEN + NOW_AND_THEN)(run, dice)

    return script


@pytest.mark.filterwarnings("ignore:training was called with more signatures")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("zero", ["none", "buffers"])
def test_full_iteration(device: torch.device, seed: int, zero: str) -> None:
    run = compared(device, "full_iteration", random_job(seed, 40), build=partial(Decoder, dropout=0.1), zero=zero)
    assert run.num_replays > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("modules", [(), ("attn",)], ids=["layers", "attn"])
def test_local(device: torch.device, seed: int, modules: Any) -> None:
    schedule = partial(in_order, *ORDERS)
    build = partial(Decoder, dropout=0.1)
    run = compared(device, "local", random_job(seed, 40), build=build, modules=modules, schedule=schedule)
    assert run.num_replays > 0
