"""A run that is verified before and shadowed on its way is the run without that, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.training.doubles import EagerStrategy, MemoryLog, tiny_config
from torch import Tensor, nn

from graphstep.config import CudaGraphConfig
from graphstep.errors import VerificationError
from graphstep.models.mlp import MLP
from graphstep.training.loop import Trainer

PROVED = {"cuda_graph_verify": 2, "cuda_graph_shadow_interval": 2}
IMPLS = ("local", "transformer_engine", "full_iteration")


def config_of(impl: str, **options: Any) -> Any:
    nan_check = {"check_for_nan_in_loss_and_grad": False} if impl == "full_iteration" else {}
    return tiny_config(graphs=impl, train_iters=7, **nan_check, **options)


def run(config: Any, **parts: Any) -> tuple[Trainer, MemoryLog, list[Tensor]]:
    losses: list[Tensor] = []
    trainer = Trainer(config, on_step=lambda _, found: losses.append(found), **parts)
    log = MemoryLog()
    trainer._log = log
    with trainer:
        trainer.train()
        weights = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    log.events.insert(0, ("weights", weights))
    return trainer, log, losses


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("impl", IMPLS)
def test_the_run_is_the_one_without(impl: str, bf16: bool) -> None:
    plain, plain_log, plain_losses = run(config_of(impl, bf16=bf16))
    proved, log, losses = run(config_of(impl, bf16=bf16, **PROVED))
    assert all(torch.equal(a, b) for a, b in zip(plain_losses, losses, strict=True))
    expected, found = plain_log.events[0][1], log.events[0][1]
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    rows = [[(r.name, r.num_replays, dict(r.eager_calls)) for r in t.report().rows] for t in (plain, proved)]
    assert rows[0] == rows[1]
    assert all(torch.equal(plain._random[name], proved._random[name]) for name in plain._random)
    report = proved.verification
    assert report is not None
    assert report.equal, str(report)
    assert report.num_steps == 2
    (event,) = [values for name, values in log.events if name == "verification"]
    assert event["is_equal"] is True
    shadows = [values for name, values in log.events if name == "shadow"]
    # The step that captures a whole iteration has no graph before.
    assert [values["iteration"] for values in shadows] == ([4, 6] if impl == "full_iteration" else [2, 4, 6])
    assert all(values["is_equal"] for values in shadows), shadows


def test_the_graph_of_the_optimizer_is_verified_too() -> None:
    config = tiny_config(train_iters=4, cuda_graph_verify=2)
    config = type(config)(
        model=config.model,
        training=config.training,
        data=config.data,
        graphs=CudaGraphConfig(impl="local", optimizer=True),
    )
    trainer, _, _ = run(config)
    assert trainer.verification is not None
    assert trainer.verification.equal
    # One layer and two microbatches, and the optimizer.
    assert trainer.verification.num_replays == 2 * (2 + 1)


class Counter:
    """A number that a replay does not see change, deep in an object."""

    def __init__(self) -> None:
        self.places: Any = {"a": {"b": {"c": {"d": [0]}}}}

    def next(self) -> int:
        self.places["a"]["b"]["c"]["d"][0] += 1
        return int(self.places["a"]["b"]["c"]["d"][0])


def plant_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = MLP.forward
    counter = Counter()

    def counting(self: nn.Module, *arguments: Any) -> Any:
        return forward(self, *arguments) * (1 + 1 / counter.next())

    monkeypatch.setattr(MLP, "forward", counting)


@pytest.mark.parametrize("impl", ["local", "full_iteration"])
def test_a_run_that_differs_does_not_start(impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant_fault(monkeypatch)
    trainer = Trainer(config_of(impl, cuda_graph_verify=2))
    before = {name: tensor.clone() for name, tensor in trainer.weights().items()}
    with trainer, pytest.raises(VerificationError) as error:
        trainer.train()
    assert trainer.iteration == 0
    assert "layers.0.mlp, forward" in str(error.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in trainer.weights().items())


def test_a_shadow_says_where_a_run_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_fault(monkeypatch)
    _, log, _ = run(config_of("local", cuda_graph_shadow_interval=3))
    shadows = [values for name, values in log.events if name == "shadow"]
    assert [values["iteration"] for values in shadows] == [3, 6]
    assert not any(values["is_equal"] for values in shadows)
    assert all(values["first"]["module"] == "layers.0" for values in shadows)


def test_a_strategy_of_ones_own_is_verified_as_far_as_it_replays() -> None:
    config = tiny_config(graphs="local", train_iters=3, cuda_graph_verify=1)
    trainer, _, _ = run(config, strategy_factory=EagerStrategy)
    assert trainer.verification is not None
    assert trainer.verification.equal
    assert trainer.strategy.num_closed == 1
