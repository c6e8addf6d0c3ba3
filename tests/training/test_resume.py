"""A run that was stopped and resumed equals the run that was not, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.training.doubles import EagerStrategy, tiny_config

from graphstep.errors import CheckpointError, UserInputError
from graphstep.training.loop import Trainer


def trainer_of(**options: object) -> Trainer:
    return Trainer(tiny_config(**options), strategy_factory=EagerStrategy)


def run(**options: object) -> tuple[Trainer, list[torch.Tensor]]:
    losses: list[torch.Tensor] = []
    config = tiny_config(**options)
    trainer = Trainer(config, strategy_factory=EagerStrategy, on_step=lambda _, values: losses.append(values))
    trainer.train()
    return trainer, losses


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("stop", [1, 4])
def test_resumed_equals_uninterrupted(tmp_path: Path, bf16: bool, stop: int) -> None:
    options = {"bf16": bf16, "eval_iters": 1, "eval_interval": 3, "lr": 1e-2}
    whole, losses = run(**options)
    trainer_of(**options, save=str(tmp_path)).train(stop)
    torch.manual_seed(0)
    resumed, later = run(**options, load=str(tmp_path))
    assert resumed.iteration == whole.iteration == 6
    assert torch.equal(torch.stack(later), torch.stack(losses[stop:]))
    assert all(torch.equal(t, whole.weights()[name]) for name, t in resumed.weights().items())
    ours, theirs = resumed.optimizer.state_dict(), whole.optimizer.state_dict()
    assert all(torch.equal(t, theirs[name]) for name, t in ours.items())
    assert resumed.batches.state_dict() == whole.batches.state_dict()


def test_checkpoints_come_at_intervals_and_at_the_end(tmp_path: Path) -> None:
    run(save=str(tmp_path), save_interval=4)
    assert sorted(p.name for p in tmp_path.glob("iter_*")) == ["iter_0000004", "iter_0000006"]
    state = json.loads((tmp_path / "iter_0000006" / "state.json").read_text())
    assert state["config"]["model"]["hidden_size"] == 16
    assert state["progress"]["loss"] > 0


def test_a_named_folder_is_loaded_instead_of_the_latest(tmp_path: Path) -> None:
    run(save=str(tmp_path), save_interval=4)
    assert trainer_of(load=str(tmp_path)).iteration == 6
    assert trainer_of(load=str(tmp_path / "iter_0000004")).iteration == 4


def test_a_finished_run_writes_nothing_new(tmp_path: Path) -> None:
    run(save=str(tmp_path))
    before = (tmp_path / "iter_0000006" / "state.json").stat().st_mtime_ns
    _, losses = run(save=str(tmp_path), load=str(tmp_path))
    assert losses == []
    assert (tmp_path / "iter_0000006" / "state.json").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": {"hidden_size": 32}}, ["--hidden-size is 32 here and 16 in the checkpoint"]),
        ({"model": {"num_layers": 3}}, ["--num-layers is 3 here and 1 in the checkpoint"]),
        ({"model": {"num_attention_heads": 4}}, ["--num-attention-heads is 4 here and 2 in the checkpoint"]),
        ({"bf16": True}, ["--bf16 is on here and off in the checkpoint"]),
        (
            {"bf16": True, "model": {"hidden_size": 32}},
            ["--hidden-size is 32 here and 16 in the checkpoint", "--bf16 is on here and off in the checkpoint"],
        ),
    ],
    ids=["shape", "layers", "heads", "precision", "both"],
)
def test_another_model_is_refused_by_its_options(tmp_path: Path, changes: dict, expected: list[str]) -> None:
    run(save=str(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        trainer_of(load=str(tmp_path), **changes)
    assert [problem.what for problem in caught.value.problems] == expected


def test_another_precision_is_refused_the_other_way_round(tmp_path: Path) -> None:
    run(save=str(tmp_path), bf16=True)
    with pytest.raises(CheckpointError, match="--bf16 is off here and on in the checkpoint"):
        trainer_of(load=str(tmp_path))


def test_another_seed_is_refused(tmp_path: Path) -> None:
    run(save=str(tmp_path))
    with pytest.raises(UserInputError, match="seed"):
        trainer_of(load=str(tmp_path), seed=5)


def test_dropout_may_change(tmp_path: Path) -> None:
    run(save=str(tmp_path))
    assert trainer_of(load=str(tmp_path), model={"hidden_dropout": 0.0, "attention_dropout": 0.0}).iteration == 6
