"""Values that a graph bakes in, and what happens when they change between replays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.strategies.models import Decoder, run_microbatches
from tests.strategies.runs import Run, compared
from torch import Tensor, nn

FULL = "full_iteration"


def changing(change: Callable[[Any, int], None], build: Callable[[], nn.Module], num_steps: int = 9) -> Any:
    def script(run: Run) -> None:
        for step in range(num_steps):
            change(run.model, step)
            run.step(2)

    return script, build


def set_dropout(model: Any, step: int) -> None:
    for layer in model.layers:
        layer.dropout = 0.1 if step < 5 else 0.3


def test_a_dropout_probability_that_changes(device: torch.device) -> None:
    script, build = changing(set_dropout, lambda: Decoder(dropout=0.1))
    run = compared(device, FULL, script, build=build)
    assert run.num_replays == 4 + 3
    assert run.reasons() == {"warmup": 1, "warmup after a change of layers.0.dropout": 1}


@pytest.mark.filterwarnings("ignore:training has been captured")
def test_a_value_that_changes_every_step_is_never_replayed_wrongly(device: torch.device) -> None:
    def change(model: Any, step: int) -> None:
        model.layers[0].dropout = 0.1 + 0.01 * step

    script, build = changing(change, lambda: Decoder(dropout=0.1))
    run = compared(device, FULL, script, build=build)
    assert run.report.num_recordings <= 1


def test_an_equal_value_set_again_changes_nothing(device: torch.device) -> None:
    def change(model: Any, step: int) -> None:
        model.layers[0].dropout = float("0.25")

    script, build = changing(change, lambda: Decoder(dropout=0.25))
    assert compared(device, FULL, script, build=build).num_replays == 8


def add_parameter_hook(model: Any) -> Any:
    return model.layers[0].mix.out.weight.register_hook(lambda gradient: gradient * 2)


def add_module_hook(model: Any) -> Any:
    return model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: output * 0.5)


def add_accumulation_hook(model: Any) -> Any:
    return model.norm.weight.register_post_accumulate_grad_hook(halve)


def halve(parameter: Tensor) -> None:
    parameter.grad.mul_(0.5)


@pytest.mark.parametrize("add", [add_parameter_hook, add_module_hook, add_accumulation_hook])
def test_hooks_that_come_and_go(device: torch.device, add: Any) -> None:
    """What they compute is in the graph; a graph with other hooks is not replayed."""

    def script(run: Run) -> None:
        for step in range(9):
            if step == 3:
                handle = add(run.model)
            if step == 6:
                handle.remove()
            run.step(1)

    run = compared(device, FULL, script, build=lambda: Decoder(dropout=0.1), zero="zeros")
    assert run.num_replays == 3 * 2


class WithAttributes(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.ones(())
        self.act: Callable[[Tensor], Tensor] = torch.tanh

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        self.last_loss = self.act(super().forward(tokens, labels)) * self.factor.to(tokens.device)
        return self.last_loss


def set_factor(model: Any, step: int) -> None:
    if step == 4:
        model.factor = torch.full((), 2.0)


def set_act(model: Any, step: int) -> None:
    if step == 4:
        model.act = torch.sigmoid


@pytest.mark.parametrize("change", [set_factor, set_act])
def test_an_attribute_that_is_no_number(device: torch.device, change: Any) -> None:
    """Attributes assigned between replays are seen; those that the step assigns itself do not count."""
    if device.type == "cuda":
        pytest.skip("a tensor on the host is refused on a GPU")
    script, build = changing(change, WithAttributes)
    assert compared(device, FULL, script, build=build).num_replays == 3 + 4


def test_a_tensor_attribute_holds_the_latest_value(device: torch.device) -> None:
    run = Run(device, FULL, build=WithAttributes)
    if device.type == "cuda":
        run.model.factor = run.model.factor.to(device)
    for _ in range(4):
        losses = run.step(2)
        assert torch.equal(run.model.last_loss.detach(), losses[-1])
    run.strategy.close()


def test_a_kernel_keyed_on_a_counter_of_the_host(device: torch.device) -> None:
    """Three replays with other inputs each; a counter in the function does not move."""
    calls: list[int] = []

    def counted(**arguments: Any) -> Tensor:
        calls.append(1)
        return run_microbatches(**arguments)

    run = Run(device, FULL, forward_backward=counted)
    for _ in range(6):
        run.step(1)
    assert len(calls) == 2
    run.strategy.close()


class Lazy(Decoder):
    """Does more on its first call, and keeps what it made."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0.5, 1.5, 4, device=tokens.device)
        return super().forward(tokens, labels) * self.table.sum()


@pytest.mark.parametrize("warmup_steps", [0, 1, 2])
def test_what_is_made_on_the_first_call(device: torch.device, warmup_steps: int) -> None:
    def script(run: Run) -> None:
        for step in range(7):
            run.step(1)
            if step % 3 == 2:
                run.evaluate(1)

    compared(device, FULL, script, build=Lazy, warmup_steps=warmup_steps)


def test_a_step_that_updates_state_in_place(device: torch.device) -> None:
    """It advances once a replay, as it does once an eager call."""
    lengths: dict[int, Tensor] = {}

    def advancing(*, model: nn.Module, **arguments: Any) -> Tensor:
        counter = lengths.setdefault(id(model), torch.zeros((), device=device))
        counter.add_(1)
        return run_microbatches(model=model, **arguments) * counter

    compared(device, FULL, lambda run: [run.step(2) for _ in range(5)], forward_backward=advancing)


class Recomputed(Decoder):
    reentrant = False

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        x = self.embedding(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        logits = nn.functional.linear(self.norm(x), self.embedding.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class RecomputedReentrant(Recomputed):
    reentrant = True


@pytest.mark.parametrize("build", [Recomputed, RecomputedReentrant])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_recompute(device: torch.device, build: Any, dropout: float) -> None:
    """Recomputed forwards use the mask of the first one, and their parameters get gradients."""
    compared(device, FULL, lambda run: [run.step(2) for _ in range(5)], build=lambda: build(dropout=dropout))


def test_a_leaf_outside_the_model(device: torch.device) -> None:
    """A parameter that no module owns is watched, and trained."""
    from graphstep.errors import StaleAddressError

    prompts: dict[int, nn.Parameter] = {}

    def prompted(*, model: nn.Module, **arguments: Any) -> Tensor:
        prompt = prompts.setdefault(id(model), nn.Parameter(torch.ones((), device=device)))
        (prompt * 3).backward()
        return run_microbatches(model=model, **arguments) + prompt.detach()

    run = Run(device, FULL, forward_backward=prompted)
    for step in range(4):
        run.step(1)
        prompt = prompts[id(run.model)]
        assert prompt.grad is not None
        assert float(prompt.grad) == 3.0 * (step + 1)
    prompt.data = torch.zeros_like(prompt)
    with pytest.raises(StaleAddressError, match="outside the model"):
        run.forward_backward([run.batch()])
    run.strategy.close()
