"""Calls that no graph serves run eagerly, are counted with a reason, and are right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.models import Decoder, Layer, run_microbatches
from tests.strategies.runs import Run, compared
from torch import Tensor, nn

from graphstep.errors import StaleAddressError

LOCAL = "local"
WITH_DROPOUT = partial(Decoder, dropout=0.2)


def test_evaluation_between_steps(device: torch.device) -> None:
    """No dropout and no counting in evaluation."""

    def script(run: Run) -> None:
        for step in range(5):
            run.step(2)
            run.evaluate(3)
            if step == 0:
                run.evaluate(1, length=9)

    run = compared(device, LOCAL, script, build=WITH_DROPOUT)
    assert run.num_replays == 2 * 4 * 2
    assert run.reasons() == {"observed": 4, "evaluation": 2 * (5 * 3 + 1)}


def test_evaluation_before_the_first_step(device: torch.device) -> None:
    def script(run: Run) -> None:
        run.evaluate(2)
        for _ in range(4):
            run.step(1)

    assert compared(device, LOCAL, script, build=WITH_DROPOUT).num_replays == 2 * 3


def test_evaluation_with_gradients_on(device: torch.device) -> None:
    """The signature tells it from training; what it leaves unfinished is no part of the plan."""

    def script(run: Run) -> None:
        for _ in range(4):
            run.model.eval()
            batch = {name: value.to(run.device) for name, value in run.batch(length=5).items()}
            run.note(run.model(batch["tokens"], batch["labels"]).detach())
            run.model.train()
            run.step(2)

    run = compared(device, LOCAL, script, build=WITH_DROPOUT)
    assert run.num_replays == 2 * 3 * 2
    assert run.reasons()["evaluation"] == 2 * 3


def test_training_in_evaluation_mode(device: torch.device) -> None:
    def script(run: Run) -> None:
        run.model.eval()
        for step in range(5):
            run.step(2)
            if step == 2:
                run.model.train()

    run = compared(device, LOCAL, script, build=WITH_DROPOUT)
    assert run.num_replays == 2 * 2 * 2
    assert run.reasons() == {"observed": 4, "evaluation": 2 * 2 * 2}


def test_part_of_a_layer_in_evaluation(device: torch.device) -> None:
    def script(run: Run) -> None:
        run.model.layers[1].mlp.eval()
        for _ in range(4):
            run.step(1)

    assert compared(device, LOCAL, script, build=WITH_DROPOUT).num_replays == 2 * 3


def test_other_lengths(device: torch.device) -> None:
    """Another sequence length runs eagerly, and the captured one goes on."""

    def script(run: Run) -> None:
        for length in (6, 9, 6, 5, 6):
            run.step(2, length=length)

    run = compared(device, LOCAL, script, build=WITH_DROPOUT)
    assert run.num_replays == 2 * 2 * 2
    assert run.reasons() == {"observed": 4, "another signature": 8}


def test_lengths_differ_within_the_first_step(device: torch.device) -> None:
    def script(run: Run) -> None:
        for _ in range(4):
            run.step(batches=[run.batch(length=length) for length in (6, 9, 6)])

    run = compared(device, LOCAL, script, build=WITH_DROPOUT)
    assert run.num_replays == 3 * 3 * 2


def test_nothing_is_captured_before_the_step_ends(device: torch.device) -> None:
    run = Run(device, LOCAL)
    for _ in range(3):
        run.forward_backward([run.batch()])
        assert run.report.num_recordings == 0
    run.strategy.end_step()
    assert run.report.num_recordings == 4
    run.strategy.end_step()
    assert run.report.num_recordings == 4
    run.strategy.close()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_that_ends_under_a_mode(device: torch.device, mode: Any) -> None:
    def script(run: Run) -> None:
        for _ in range(3):
            run.optimizer.zero_grad(set_to_none=True)
            run.note(run.forward_backward([run.batch()]))
            run.optimizer.step()
            with mode():
                run.strategy.end_step()

    assert compared(device, LOCAL, script, build=WITH_DROPOUT).num_replays == 2 * 2


def test_a_step_without_backward_captures_nothing(device: torch.device) -> None:
    run = Run(device, LOCAL)
    run.evaluate(2)
    run.strategy.end_step()
    assert run.report.num_recordings == 0
    run.step(1)
    run.step(1)
    assert run.num_replays == 2
    run.strategy.close()


def forgets_one(*, data_iterator: Any, model: nn.Module, num_microbatches: int, forward_only: bool = False) -> Tensor:
    """Runs one forward too many and drops its result."""
    batch = next(data_iterator)
    model(batch["tokens"], batch["labels"])
    return run_microbatches(
        data_iterator=data_iterator, model=model, num_microbatches=num_microbatches - 1, forward_only=forward_only
    )


def test_a_dropped_result_frees_its_slot(device: torch.device) -> None:
    run = compared(device, LOCAL, lambda run: [run.step(3) for _ in range(4)], forward_backward=forgets_one)
    assert run.reasons() == {"observed": 6}
    assert all(row.num_recordings == 2 for row in run.report.rows)


def test_an_attribute_that_changes(device: torch.device) -> None:
    def script(run: Run) -> None:
        for step in range(7):
            run.model.layers[0].dropout = 0.5 if step in (3, 4) else 0.2
            run.step(2)

    run = compared(device, LOCAL, script, build=WITH_DROPOUT)
    assert run.reasons() == {"observed": 4, "an attribute or hook changed after the capture": 4}
    assert [row.last_detail for row in run.report.rows] == ["layers.0.dropout", ""]
    assert run.num_replays == (4 + 6) * 2


class SetsAttributes(Layer):
    """Assigns attributes in its forward, as weights that are computed anew do."""

    def _mlp(self, x: Tensor, *context: Tensor) -> Tensor:
        self.computed = x.detach() * 2
        return super()._mlp(x, *context)


def test_an_attribute_that_the_layer_sets_itself(device: torch.device) -> None:
    def script(run: Run) -> None:
        for _ in range(4):
            run.step(1)
            run.evaluate(1)

    assert compared(device, LOCAL, script, build=partial(Decoder, layer=SetsAttributes)).num_replays == 2 * 3


def test_a_hook_on_a_gradient_that_comes_later(device: torch.device) -> None:
    def script(run: Run) -> None:
        for step in range(5):
            if step == 3:
                run.model.layers[0].mix.out.weight.register_hook(lambda gradient: gradient * 2)
            run.step(2)

    run = compared(device, LOCAL, script, build=WITH_DROPOUT)
    assert run.num_replays == (2 * 2 + 1 * 2) * 2


MOVES: dict[str, tuple[Callable[[Decoder], Any], str]] = {
    "replaced": (
        lambda model: setattr(model.layers[1].mix.out, "weight", nn.Parameter(model.layers[1].mix.out.weight.data)),
        "layers.1.mix.out.weight",
    ),
    "moved": (
        lambda model: setattr(model.layers[0].mlp[1].bias, "data", model.layers[0].mlp[1].bias.data.clone()),
        "layers.0.mlp.1.bias",
    ),
    "buffer": (lambda model: setattr(model.layers[0].mix, "mean", model.layers[0].mix.mean + 0), "layers.0.mix.mean"),
    "module": (lambda model: model.layers[0].mlp.__setitem__(1, copy.deepcopy(model.layers[0].mlp[1])), "mlp.1"),
    "adapter": (
        lambda model: model.layers[0].mlp[1].register_parameter("lora", nn.Parameter(torch.zeros(1))),
        "layers.0.mlp.1.lora",
    ),
}


@pytest.mark.parametrize("name", MOVES)
def test_what_moved_is_named(device: torch.device, name: str) -> None:
    run = Run(device, LOCAL)
    run.step(1)
    run.step(1)
    MOVES[name][0](run.model)
    with pytest.raises(StaleAddressError) as caught:
        run.forward_backward([run.batch()])
    assert MOVES[name][1] in caught.value.what
    run.strategy.close()


@pytest.mark.parametrize("name", MOVES)
def test_what_moves_before_the_capture_is_fine(device: torch.device, name: str) -> None:
    """The failure path of an adapter switch, a late load of weights: addresses count from the capture on."""

    def script(run: Run) -> None:
        MOVES[name][0](run.model)
        run.model.to(run.device)
        for _ in range(3):
            run.step(2)

    assert compared(device, LOCAL, script).num_replays > 0


def test_a_checkpoint_loaded_in_the_middle(device: torch.device) -> None:
    def script(run: Run) -> None:
        run.step(1)
        run.step(1)
        saved = {name: value.clone() for name, value in run.model.state_dict().items()}
        run.step(1)
        run.model.load_state_dict(saved)
        run.step(1)

    assert compared(device, LOCAL, script, build=WITH_DROPOUT).num_replays == 2 * 3


def test_gradients_accumulate_over_steps(device: torch.device) -> None:
    def script(run: Run) -> None:
        for call in range(6):
            if call % 3 == 0:
                run.optimizer.zero_grad(set_to_none=True)
            run.note(run.forward_backward([run.batch()]))
            run.strategy.end_step()
            if call % 3 == 2:
                run.optimizer.step()

    assert compared(device, LOCAL, script).num_replays == 2 * 5
