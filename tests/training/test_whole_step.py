"""Training with the optimizer in a graph: of its own, or in that of the whole step; and checks one step later."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.reusing import memory_is_reused
from tests.training.doubles import tiny_config
from torch import Tensor

from graphstep.config import CudaGraphConfig, RunConfig
from graphstep.errors import NonFiniteError
from graphstep.training.compare import StepTrace, compare_with_eager
from graphstep.training.loop import Trainer

IMPLS = ("none", "local", "transformer_engine", "full_iteration")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with memory_is_reused():
        yield request.param


def config_of(device: str, impl: str, **training: Any) -> RunConfig:
    model = {"num_layers": 2, "attention_dropout": 0.1, "hidden_dropout": 0.1, "seq_length": 8}
    options = {"check_for_nan_in_loss_and_grad": False, "train_iters": 8, "clip_grad": 0.05, "device": device}
    run = tiny_config(model=model, **{**options, **training})
    return dataclasses.replace(run, graphs=CudaGraphConfig(impl=impl, warmup_steps=1, optimizer=True))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_training_equals_eager(device: str, impl: str, bf16: bool, deferred: bool) -> None:
    deterministic = {"deterministic_mode": True} if device == "cuda" else {}
    config = config_of(
        device, impl, bf16=bf16, deferred_nan_check=deferred, eval_iters=1, eval_interval=3, **deterministic
    )
    trace = StepTrace(8)
    with Trainer(config, on_step=trace.observe) as trainer:
        result = trainer.train()
        trace.finish(trainer)
    row = next(
        row for row in result.report.rows if row.name == ("training" if impl == "full_iteration" else "optimizer")
    )
    assert row.num_replays >= 6
    comparison = compare_with_eager(config, trace)
    assert comparison.is_equal, str(comparison.difference)


@pytest.mark.parametrize("impl", ["none", "local"])
def test_with_the_check_of_each_step(device: str, impl: str) -> None:
    config = config_of(device, impl, check_for_nan_in_loss_and_grad=True)
    trace = StepTrace(8)
    with Trainer(config, on_step=trace.observe) as trainer:
        trainer.train()
        trace.finish(trainer)
        assert any(row.name == "optimizer" and row.num_replays for row in trainer.report().rows)
    assert compare_with_eager(config, trace).is_equal


@pytest.mark.parametrize("impl", ["local", "full_iteration"])
def test_a_resumed_run_equals_an_uninterrupted_one(device: str, impl: str, tmp_path: Path) -> None:
    whole, first, second = (dict[str, Tensor]() for _ in range(3))

    def weights(config: RunConfig, into: dict[str, Tensor], num_steps: int | None = None) -> None:
        with Trainer(config) as trainer:
            trainer.train(num_steps)
            into.update((name, value.detach().clone()) for name, value in trainer.weights().items())

    deterministic = {"deterministic_mode": True} if device == "cuda" else {}
    weights(config_of(device, impl, **deterministic), whole)
    weights(config_of(device, impl, save=str(tmp_path), **deterministic), first, 4)
    weights(config_of(device, impl, load=str(tmp_path), **deterministic), second)
    assert all(torch.equal(value, second[name]) for name, value in whole.items())
    assert not all(torch.equal(value, first[name]) for name, value in whole.items())


def poison_at(step: int) -> Any:
    """Spoils a weight after this step, so that the next one is not finite, and mends it after that one."""

    def on_step(trainer: Trainer, _losses: Tensor) -> None:
        weight = trainer.model.get_parameter("layers.0.mlp_norm.weight")
        with torch.no_grad():
            if trainer.iteration == step:
                weight[0] = float("nan")
            elif trainer.iteration == step + 1:
                weight[0] = 1.0

    return on_step


@pytest.mark.parametrize("impl", ["none", "local", "full_iteration"])
def test_what_is_not_finite_is_named_one_step_later(device: str, impl: str) -> None:
    config = config_of(device, impl, deferred_nan_check=True, log_interval=3)
    with Trainer(config, on_step=poison_at(5)) as trainer:
        with pytest.raises(NonFiniteError) as caught:
            trainer.train()
        assert trainer.iteration in (6, 7, 8)
        assert "iteration 6" in caught.value.where
        assert "loss of microbatch 0 is nan" in caught.value.what
        assert "more parameters" in caught.value.what
        weights = trainer.weights()
    assert all(torch.isfinite(value).all() for value in weights.values()), "the step must leave the weights alone"


@pytest.mark.parametrize("impl", ["none", "full_iteration"])
def test_the_last_step_is_looked_at_as_well(device: str, impl: str) -> None:
    with (
        Trainer(config_of(device, impl, deferred_nan_check=True), on_step=poison_at(7)) as trainer,
        pytest.raises(NonFiniteError, match="microbatch"),
    ):
        trainer.train()


def test_options_that_do_nothing_without_a_gpu_are_named() -> None:
    config = config_of(
        "cpu", "full_iteration", compile=True, fuse_gradient_accumulation=True, parallel_weight_gradients=True
    )
    with Trainer(config) as trainer:
        assert any("--compile and --parallel-weight-gradients need a GPU" in notice for notice in trainer.notices)
    with Trainer(config_of("cpu", "full_iteration")) as trainer:
        assert not any("GPU" in notice for notice in trainer.notices)
