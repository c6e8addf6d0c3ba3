"""Everything that happens to a training job, in random order, bit for bit as without graphs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.attached import Frozen, Loop, TiedWeights, schedule, twins
from tests.strategies.models import HIDDEN, Decoder
from tests.strategies.toy_moe import MoeDecoder

ORDERS = ("fb", "fbfb", "ffbb", "ffBB", "fbffbb", "fffbBb", "ffbfbfbb")


def train(loop: Loop, dice: random.Random) -> None:
    lengths = [dice.choice([6, 6, 6, 9, 4])] * 4 if dice.random() < 0.8 else dice.choices([6, 9, 4], k=4)
    loop.step(batches=[loop.batch(length=length) for length in lengths[: dice.choice([1, 2, 2, 3, 4])]])


def accumulate(loop: Loop, dice: random.Random) -> None:
    loop.note(loop.forward_backward([loop.batch()]))


def evaluate(loop: Loop, dice: random.Random) -> None:
    loop.evaluate(dice.choice([1, 2]), length=dice.choice([6, 9]))


def evaluate_with_gradients(loop: Loop, dice: random.Random) -> None:
    loop.model.eval()
    batch = {name: value.to(loop.device) for name, value in loop.batch().items()}
    loop.note(loop.model(batch["tokens"], batch["labels"]).detach().clone())
    loop.model.train()


def drop_a_forward(loop: Loop, dice: random.Random) -> None:
    batch = {name: value.to(loop.device) for name, value in loop.batch().items()}
    loop.note(loop.model(batch["tokens"], batch["labels"]).detach().clone())


def load(loop: Loop, dice: random.Random) -> None:
    loop.model.load_state_dict({name: value.clone() for name, value in loop.model.state_dict().items()})


def resume(loop: Loop, dice: random.Random) -> None:
    loop.resume()


def change_dropout(loop: Loop, dice: random.Random) -> None:
    loop.model.layers[dice.randrange(2)].dropout = dice.choice([0.1, 0.3])


def switch_mode_of_a_part(loop: Loop, dice: random.Random) -> None:
    loop.model.layers[dice.randrange(2)].mlp.train(dice.random() < 0.7)


def seed(loop: Loop, dice: random.Random) -> None:
    torch.manual_seed(dice.randrange(3))


def change_zeroing(loop: Loop, dice: random.Random) -> None:
    loop.zero = dice.choice(["none", "zeros"])


def replace_gradients(loop: Loop, dice: random.Random) -> None:
    for parameter in loop.model.layers[0].parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None


def use_autocast(loop: Loop, dice: random.Random) -> None:
    loop.autocast = dice.choice([None, None, torch.bfloat16])


def end_step(loop: Loop, dice: random.Random) -> None:
    if loop.manager is not None:
        loop.manager.end_step()


OFTEN: tuple[Callable[[Loop, random.Random], None], ...] = (train,) * 14 + (evaluate,) * 2
NOW_AND_THEN = (
    *(accumulate, evaluate_with_gradients, drop_a_forward, load, change_dropout, switch_mode_of_a_part, seed),
    *(change_zeroing, replace_gradients, use_autocast, end_step),
)


def call_a_layer_alone(loop: Loop, dice: random.Random) -> None:
    """What was launched with its end for the next layer has never run."""
    layer = loop.model.layers[dice.randrange(len(loop.model.layers))]
    x = torch.full((2, 6, HIDDEN), 0.5, device=loop.device, requires_grad=True)
    y = layer(x)
    if dice.random() < 0.5:
        (y * x.detach()).sum().backward()
    result = y.detach().clone()
    del y
    loop.note(result)


def skip_layers(loop: Loop, dice: random.Random) -> None:
    numbers = range(len(loop.model.layers))
    loop.model.order = tuple(sorted(dice.sample(numbers, dice.choice([1, 2, 3, 3]))))


def change_a_result(loop: Loop, dice: random.Random) -> None:
    layer = loop.model.layers[dice.randrange(len(loop.model.layers))]
    hook = layer.register_forward_hook(lambda _module, _arguments, result: result * 1.25)
    train(loop, dice)
    hook.remove()


BETWEEN_LAYERS = (call_a_layer_alone, skip_layers, change_a_result)


def random_job(
    number: int, num_actions: int, left_out: Sequence[Any] = (), more: Sequence[Any] = ()
) -> Callable[[Loop], None]:
    actions = [action for action in (*OFTEN, *NOW_AND_THEN, *more) if action not in left_out]

    def script(loop: Loop) -> None:
        dice = random.Random(number)
        for _ in range(num_actions):
            dice.choice(actions)(loop, dice)
        resume(loop, dice)
        for _ in range(3):
            train(loop, dice)

    return script


CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "few signatures": {"max_signatures": 2, "capture_after": 1},
    "merged": {"merge_layers": 0, "capture_after": 1},
    "parts": {"modules": ("attn",)},
    "debug": {"debug": True, "capture_after": 1, "max_signatures": 3},
}


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("build", [partial(Decoder, dropout=0.1), TiedWeights, Frozen], ids=["plain", "tied", "frozen"])
def test_random_jobs(device: torch.device, build: Any, config: str, number: int) -> None:
    left_out = [use_autocast] if build is TiedWeights else []  # Eagerly, parts of a shared gradient are summed in bf16.
    job = random_job(number, 14, left_out)
    twins(device, job, build=build, config=CONFIGS[config], schedule=schedule(*ORDERS))


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("config", ["default", "few signatures", "merged", "debug"])
@pytest.mark.parametrize("letters", ["EEE", "EDe"])
def test_random_jobs_with_experts(device: torch.device, letters: str, config: str, number: int) -> None:
    """The end of a layer is launched with the next one, whose router counts; and then that one may not be called."""
    job = random_job(number, 14, [switch_mode_of_a_part], BETWEEN_LAYERS * 2)
    options = {**CONFIGS[config], "modules": ("attn", "moe_router", "moe_preprocess")}
    twins(device, job, build=partial(MoeDecoder, letters), config=options, schedule=schedule(*ORDERS))
