from __future__ import annotations

import math

import pytest

from graphstep.config import TrainingConfig
from graphstep.training.schedules import learning_rate

LR, MIN, ITERS, WARMUP = 1.0, 0.1, 110, 10


def config(style: str, **options: object) -> TrainingConfig:
    values = {"train_iters": ITERS, "lr": LR, "min_lr": MIN, "lr_decay_style": style, "lr_warmup_iters": WARMUP}
    return TrainingConfig(**{**values, **options})


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
def test_warmup_is_linear_from_the_initial_rate(style: str) -> None:
    plain, raised = config(style), config(style, lr_warmup_init=0.5)
    for step in range(WARMUP + 1):
        assert learning_rate(plain, step) == pytest.approx(LR * step / WARMUP)
        assert learning_rate(raised, step) == pytest.approx(0.5 + 0.5 * step / WARMUP)


@pytest.mark.parametrize(
    ("style", "shape"),
    [("linear", lambda p: 1 - p), ("cosine", lambda p: (1 + math.cos(math.pi * p)) / 2)],
    ids=["linear", "cosine"],
)
def test_decay_follows_its_closed_form(style: str, shape) -> None:
    for step in range(WARMUP + 1, ITERS + 1):
        progress = (step - WARMUP) / (ITERS - WARMUP)
        assert learning_rate(config(style), step) == pytest.approx(MIN + (LR - MIN) * shape(progress))


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_the_minimum_is_reached_and_kept(style: str) -> None:
    short = config(style, lr_decay_iters=50)
    assert learning_rate(short, 50) == pytest.approx(MIN)
    assert [learning_rate(short, step) for step in (51, 80, ITERS, 10_000)] == [MIN] * 4


def test_constant_stays_after_warmup_for_ever() -> None:
    assert [learning_rate(config("constant"), step) for step in (11, 60, ITERS, 10_000)] == [LR] * 4


@pytest.mark.parametrize(
    ("shape_name", "shape"),
    [
        ("linear", lambda p: 1 - p),
        ("cosine", lambda p: (1 + math.cos(math.pi * p)) / 2),
        ("exponential", lambda p: 2 * 2**-p - 1),
        ("minus_sqrt", lambda p: 1 - math.sqrt(p)),
    ],
    ids=["linear", "cosine", "exponential", "minus_sqrt"],
)
def test_wsd_holds_then_decays_in_its_last_steps(shape_name: str, shape) -> None:
    wsd = config("WSD", lr_wsd_decay_style=shape_name, lr_wsd_decay_iters=20)
    assert [learning_rate(wsd, step) for step in (11, 50, 90)] == [LR] * 3
    for step in range(91, ITERS + 1):
        assert learning_rate(wsd, step) == pytest.approx(MIN + (LR - MIN) * shape((step - 90) / 20))
    assert learning_rate(wsd, ITERS) == pytest.approx(MIN)
    assert learning_rate(wsd, ITERS + 1) == MIN


def test_without_warmup_the_first_update_has_the_full_rate() -> None:
    assert learning_rate(config("cosine", lr_warmup_iters=0), 0) == LR
