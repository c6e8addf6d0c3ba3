from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.training.doubles import DisturbedStrategy, EagerStrategy, MemoryLog, tiny_config
from torch import Tensor, nn

from graphstep.errors import NonFiniteError
from graphstep.training.loop import Trainer
from graphstep.training.schedules import learning_rate


def make_trainer(strategy_factory=EagerStrategy, on_step=None, **options: object) -> tuple[Trainer, MemoryLog]:
    trainer = Trainer(tiny_config(**options), strategy_factory=strategy_factory, on_step=on_step)
    log = MemoryLog()
    trainer._log = log
    return trainer, log


def spoil_gradients(model: nn.Module, step: int, *, at: int) -> None:
    if step == at:
        next(iter(model.parameters())).grad.fill_(float("nan"))


def interrupt(model: nn.Module, step: int, *, at: int) -> None:
    if step == at:
        os.kill(os.getpid(), signal.SIGINT)


def test_the_loss_falls() -> None:
    trainer, _ = make_trainer(train_iters=40, lr=1e-2, eval_iters=2, eval_interval=100)
    result = trainer.train()
    assert (result.first_iteration, result.iteration, result.is_interrupted) == (0, 40, False)
    assert result.last_loss < result.first_loss - 0.3
    assert result.last_validation_loss < result.first_validation_loss - 0.3


@pytest.mark.parametrize("bf16", [False, True])
def test_a_run_is_a_function_of_its_configuration(bf16: bool) -> None:
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(99)
        trainer, _ = make_trainer(seed=seed, bf16=bf16)
        trainer.train()
        weights.append(trainer.weights())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])


def test_each_update_is_that_of_plain_torch() -> None:
    """The whole step against a loop written with stock parts only."""
    # No biases: that of the keys has no gradient but rounding errors, which AdamW scales up to whole updates.
    options = {"clip_grad": 0.5, "weight_decay": 0.1, "lr": 1e-2, "model": {"add_bias_linear": False}}
    trainer, _ = make_trainer(**options)
    reference, _ = make_trainer(**options)
    trainer.train()

    model, training = reference.model, reference.config.training
    reference.gradients.close()
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-8)
    torch.manual_seed(training.seed)
    for step in range(training.train_iters):
        adamw.zero_grad()
        for _ in range(training.num_microbatches):
            batch = next(reference.batches)
            (model(batch["tokens"], batch["labels"]) / training.num_microbatches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in adamw.param_groups:
            group["lr"] = learning_rate(training, step)
        adamw.step()
    for (name, ours), theirs in zip(trainer.model.named_parameters(), model.parameters(), strict=True):
        # Norm and update round differently from stock: clipping sees one flat buffer, AdamW is the fused kernel.
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


def test_log_lines_come_at_intervals_and_at_the_end() -> None:
    trainer, log = make_trainer(train_iters=5, log_interval=2, eval_iters=1, eval_interval=4)
    trainer.train()
    events = [(event, values.get("iteration")) for event, values in log.events]
    assert events == [
        ("start", 0),
        ("validation", 0),
        ("train", 2),
        ("train", 4),
        ("validation", 4),
        ("train", 5),
        ("validation", 5),
        ("end", 5),
    ]
    values = dict(log.events[2][1])
    assert values["tokens"] == 2 * 4 * 8
    assert values["learning_rate"] == pytest.approx(1e-3 / 2), "of step 1 of a warmup of 2"
    assert values["tokens_per_second"] == pytest.approx(4 * 8 * 1e3 / values["step_ms"])
    assert values["grad_norm"] > 0


def test_losses_in_the_log_are_means_over_the_interval() -> None:
    seen: list[float] = []
    trainer, log = make_trainer(train_iters=4, on_step=lambda _, losses: seen.append(float(losses.mean())))
    result = trainer.train()
    logged = [values["loss"] for event, values in log.events if event == "train"]
    assert logged == pytest.approx([(seen[0] + seen[1]) / 2, (seen[2] + seen[3]) / 2])
    assert result.first_loss == pytest.approx(seen[0])
    assert result.last_loss == pytest.approx(logged[1])


def test_validation_repeats_its_batches_and_leaves_no_trace() -> None:
    plain, _ = make_trainer(train_iters=4)
    validated, log = make_trainer(train_iters=4, eval_iters=2, eval_interval=1)
    plain.train()
    validated.train()
    assert all(torch.equal(t, plain.weights()[name]) for name, t in validated.weights().items())
    assert validated.batches.state_dict() == plain.batches.state_dict()
    first = validated.validate()
    validated._validation_loss = None
    assert validated.validate() == first
    assert len({values["loss"] for event, values in log.events if event == "validation"}) > 1


def test_a_gradient_that_is_nan_stops_the_run_before_the_update() -> None:
    factory = partial(DisturbedStrategy, partial(spoil_gradients, at=3))
    trainer, log = make_trainer(factory, log_interval=10)
    with pytest.raises(NonFiniteError, match=r"(?s)gradient norm is nan.*iteration 3.*not updated.*lower --clip-grad"):
        trainer.train()
    assert trainer.iteration == 2
    assert [values["iteration"] for event, values in log.events if event == "train"] == [2], "for the post-mortem"
    assert all(bool(t.isfinite().all()) for t in trainer.weights().values())


def test_a_loss_that_is_nan_is_named_with_its_microbatch() -> None:
    class Broken(EagerStrategy):
        def forward_backward(self, **arguments: object) -> Tensor:
            losses = super().forward_backward(**arguments)
            losses[1] = float("inf")
            return losses

    trainer, _ = make_trainer(Broken)
    with pytest.raises(NonFiniteError, match=r"(?s)loss of microbatch 1 is inf.*iteration 1"):
        trainer.train()


def test_without_the_check_a_warning_names_the_iterations() -> None:
    factory = partial(DisturbedStrategy, partial(spoil_gradients, at=3))
    trainer, log = make_trainer(factory, check_for_nan_in_loss_and_grad=False, train_iters=4)
    trainer.train()
    warned = [values["iteration"] for event, values in log.events if event == "warning"]
    assert warned == [3, 4]


def test_ctrl_c_finishes_the_step_saves_and_says_so(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    factory = partial(DisturbedStrategy, partial(interrupt, at=3))
    trainer, log = make_trainer(factory, save=str(tmp_path / "run"))
    result = trainer.train()
    assert (result.is_interrupted, result.iteration) == (True, 3)
    assert (tmp_path / "run" / "iter_0000003").is_dir()
    assert ("checkpoint", 3) in [(event, values.get("iteration")) for event, values in log.events]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_interrupts_at_once() -> None:
    def twice(model: nn.Module, step: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    trainer, _ = make_trainer(partial(DisturbedStrategy, twice))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()


def test_deterministic_mode_holds_during_the_run_only() -> None:
    seen: list[bool] = []
    trainer, _ = make_trainer(
        deterministic_mode=True,
        train_iters=3,
        on_step=lambda *_: seen.append(torch.are_deterministic_algorithms_enabled()),
    )
    trainer.train()
    assert seen == [True] * 3
    assert not torch.are_deterministic_algorithms_enabled()


def test_steady_steps_are_those_after_the_capture() -> None:
    # Validation comes first and captures for itself: that says nothing about training.
    trainer, _ = make_trainer(graphs="local", train_iters=6, log_interval=6, eval_iters=1)
    result = trainer.train()
    # One step of warmup, capture in step 2, so steps 3 to 6 count.
    assert len(trainer._ledger._steady_ms) == 4
    assert result.step_ms > 0
    eager, _ = make_trainer(train_iters=6, log_interval=6)
    eager.train()
    assert len(eager._ledger._steady_ms) == 3


def test_close_closes_everything_and_may_be_repeated() -> None:
    trainer, log = make_trainer()
    with trainer:
        trainer.train(1)
    trainer.close()
    assert trainer.strategy.num_closed == 2
    assert log.events[-1][0] == "closed"
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
