from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from tests.training.doubles import DisturbedStrategy, EagerStrategy, tiny_config
from torch import nn

from graphstep.training.compare import Comparison, StepTrace, compare_with_eager
from graphstep.training.loop import Trainer


def compare(strategy_factory, num_steps: int = 4, run_steps: int | None = None, **options: object) -> Comparison:
    config = tiny_config(graphs="local", **options)
    trace = StepTrace(num_steps)
    with Trainer(config, strategy_factory=strategy_factory, on_step=trace.observe) as trainer:
        trainer.train(run_steps)
        trace.finish(trainer)
    return compare_with_eager(config, trace, strategy_factory=EagerStrategy)


def nudge(model: nn.Module, step: int, *, at: int, by: float = 1e-6) -> None:
    if step == at:
        parameter = dict(model.named_parameters())["layers.0.mlp_norm.weight"]
        with torch.no_grad():
            parameter.add_(by)


@pytest.mark.parametrize("bf16", [False, True])
def test_equal_runs_are_equal(bf16: bool) -> None:
    comparison = compare(EagerStrategy, bf16=bf16, eval_iters=1, eval_interval=2)
    assert comparison.is_equal
    assert comparison.num_steps == 4
    assert comparison.eager_step_ms > 0


def test_a_difference_is_found_where_it_first_shows() -> None:
    comparison = compare(partial(DisturbedStrategy, partial(nudge, at=2, by=1e-2)))
    difference = comparison.difference
    assert difference.step == 3, "the weights of step 2 show in the loss of step 3"
    assert 0 < difference.loss_error < 1e-1
    assert difference.num_tensors > 1
    assert difference.weight_error > 0
    assert "first differ at step 3" in str(difference)


def test_the_smallest_difference_is_found_in_the_weights() -> None:
    comparison = compare(partial(DisturbedStrategy, partial(nudge, at=4)), lr=0.0)
    difference = comparison.difference
    assert (difference.step, difference.num_tensors) == (None, 1)
    assert difference.tensor == "layers.0.mlp_norm.weight"
    assert difference.weight_error == pytest.approx(1e-6, rel=0.1)
    assert "all losses are equal; 1 weights differ" in str(difference)


def test_later_steps_do_not_count() -> None:
    assert compare(partial(DisturbedStrategy, partial(nudge, at=5))).is_equal


def test_a_run_that_ended_early_is_compared_as_far_as_it_went() -> None:
    comparison = compare(EagerStrategy, num_steps=5, run_steps=2)
    assert comparison.is_equal
    assert comparison.num_steps == 2


def test_the_eager_run_writes_nothing(tmp_path: Path) -> None:
    outputs = {"save": str(tmp_path / "save"), "log_jsonl": str(tmp_path / "log.jsonl")}
    trace = StepTrace(2)
    with Trainer(tiny_config(), strategy_factory=EagerStrategy, on_step=trace.observe) as trainer:
        trainer.train(2)
        trace.finish(trainer)
    assert compare_with_eager(tiny_config(**outputs), trace, strategy_factory=EagerStrategy).is_equal
    assert list(tmp_path.iterdir()) == []


def test_a_resumed_run_is_compared_from_its_checkpoint(tmp_path: Path) -> None:
    with Trainer(tiny_config(save=str(tmp_path)), strategy_factory=EagerStrategy) as trainer:
        trainer.train(3)
    comparison = compare(EagerStrategy, num_steps=2, load=str(tmp_path / "iter_0000003"), save=str(tmp_path))
    assert comparison.is_equal
