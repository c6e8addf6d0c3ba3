"""The training loop with ``--cuda-graph-impl transformer_engine``: warmup, validation, resume."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training.doubles import tiny_config

from graphstep.capture.reasons import EagerReason
from graphstep.config import CudaGraphConfig
from graphstep.training.loop import Trainer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
OPTIONS: dict[str, Any] = {"eval_iters": 1, "eval_interval": 2, "lr": 1e-2, "train_iters": 8}


@pytest.fixture(autouse=True)
def workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def trained(
    impl: str, *, warmup_steps: int = 1, num_steps: int | None = None, **options: Any
) -> tuple[Trainer, list[torch.Tensor], Any]:
    """A run that is over, with the losses of its steps and its result."""
    losses: list[torch.Tensor] = []
    config = tiny_config(**{**OPTIONS, "model": {"num_layers": 2}, **options})
    if impl != "none":
        config = dataclasses.replace(config, graphs=CudaGraphConfig(impl=impl, warmup_steps=warmup_steps))  # type: ignore[arg-type]
    with Trainer(config, on_step=lambda _, values: losses.append(values.clone())) as trainer:
        result = trainer.train(num_steps)
    return trainer, losses, result


def insist_on_the_same(one: Trainer, other: Trainer) -> None:
    for mine, theirs in ((one.weights(), other.weights()), (one.optimizer.state_dict(), other.optimizer.state_dict())):
        assert mine.keys() == theirs.keys()
        assert [name for name, tensor in mine.items() if not torch.equal(tensor, theirs[name])] == []
    assert [torch.equal(mine, other._random[name]) for name, mine in one._random.items()] == [True] * len(one._random)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("warmup_steps", [1, 3])
def test_validation_between_steps_is_eager_and_changes_nothing(warmup_steps: int, bf16: bool, device: str) -> None:
    options: dict[str, Any] = {"bf16": bf16, "device": device, "deterministic_mode": device == "cuda"}
    eager, losses, expected = trained("none", **options)
    graphed, found, result = trained("transformer_engine", warmup_steps=warmup_steps, **options)
    assert torch.equal(torch.stack(found), torch.stack(losses))
    insist_on_the_same(eager, graphed)
    assert result.last_validation_loss == expected.last_validation_loss
    for row in result.report.rows:
        assert row.num_replays == (8 - warmup_steps) * 2
        # Before the first step, after every second one; each of two microbatches.
        assert row.eager_calls == {EagerReason.OBSERVED: 2 * warmup_steps, EagerReason.EVALUATION: 5 * 2}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stop", [1, 2, 5])
def test_resumed_equals_uninterrupted(tmp_path: Path, stop: int, bf16: bool, device: str) -> None:
    """Stopped in the warmup, just before the capture, and after it."""
    options: dict[str, Any] = {"bf16": bf16, "device": device, "deterministic_mode": device == "cuda"}
    eager, losses, _ = trained("none", **options)
    graphs: dict[str, Any] = {"warmup_steps": 2, **options}
    trained("transformer_engine", num_steps=stop, save=str(tmp_path), **graphs)
    resumed, later, result = trained("transformer_engine", load=str(tmp_path), **graphs)
    assert torch.equal(torch.stack(later), torch.stack(losses[stop:]))
    insist_on_the_same(eager, resumed)
    assert [row.num_replays for row in result.report.rows] == [2 * max(0, 8 - stop - 2)] * 2


@pytest.mark.parametrize("device", DEVICES)
def test_no_warmup_is_one_recorded_step_and_a_warning(device: str) -> None:
    options: dict[str, Any] = {"device": device, "deterministic_mode": device == "cuda"}
    eager, _, _ = trained("none", **options)
    with pytest.warns(UserWarning, match="cuda-graph-warmup-steps 0: the first step runs eagerly all the same"):
        graphed, _, result = trained("transformer_engine", warmup_steps=0, **options)
    insist_on_the_same(eager, graphed)
    assert [row.num_replays for row in result.report.rows] == [2 * 7] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained("transformer_engine", warmup_steps=1, **options)
