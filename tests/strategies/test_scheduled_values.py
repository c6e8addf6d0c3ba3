"""Numbers of a whole step that a schedule changes in the middle of a job: followed by the graph, or captured anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphstep
from graphstep.strategies.added_decay import type_of_number

NUM_STEPS = 12


def adamw(parameters: Any, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=2.0**-6, weight_decay=weight_decay, fused=True)


def adam(parameters: Any, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=2.0**-6, weight_decay=weight_decay, fused=True)


def adam_that_maximizes(parameters: Any, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=2.0**-6, weight_decay=weight_decay, fused=True, amsgrad=True, maximize=True)


def sgd(parameters: Any, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=2.0**-6, weight_decay=weight_decay, fused=True)


def sgd_with_momentum(parameters: Any, weight_decay: float) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"momentum": 0.9, "nesterov": True}
    return torch.optim.SGD(parameters, lr=2.0**-6, weight_decay=weight_decay, fused=True, **options)


ADDING = [adam, adam_that_maximizes, sgd, sgd_with_momentum]


class Job:
    """Everything that has a schedule lies in a tensor on the device, or in the optimizer."""

    def __init__(
        self,
        device: torch.device,
        *,
        decays_in_the_step: bool = False,
        dtype: torch.dtype = torch.float32,
        build: Callable[[Any, float], torch.optim.Optimizer] = adamw,
        unscales: bool = True,
    ) -> None:
        torch.manual_seed(0)
        self.device, self.dtype = device, dtype
        self.decays_in_the_step, self.unscales = decays_in_the_step, unscales
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).to(device, dtype)
        weight_decay = 0.0 if decays_in_the_step else 0.125
        self.optimizer = build(self.model.parameters(), weight_decay)
        # torch unscales no bfloat16 gradients on a GPU.
        has_scaler = dtype != torch.bfloat16
        self.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**8, growth_interval=4, enabled=has_scaler)
        self.clip = torch.tensor(0.5, device=device)
        self.kept = torch.tensor(1.0, device=device)
        """What weight decay leaves of a weight."""
        self.data = torch.Generator().manual_seed(1)

    def step(self, values: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(values).square().mean()
        self.scaler.scale(loss).backward()
        if self.unscales:
            self.scaler.unscale_(self.optimizer)
        parameters = list(self.model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        torch._foreach_mul_(gradients, (self.clip / (norm + 1e-6)).clamp(max=1.0))
        if self.decays_in_the_step:
            with torch.no_grad():
                torch._foreach_mul_(parameters, self.kept)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return torch.stack([loss.detach(), norm])

    def trace(self, step: Callable[[Tensor], Tensor], change: Callable[[Job, int], None]) -> list[Tensor]:
        found = []
        for index in range(NUM_STEPS):
            change(self, index)
            found.append(step(torch.randn(5, 6, generator=self.data).to(self.device, self.dtype)))
            found += [parameter.detach().clone() for parameter in self.model.parameters()]
            found.append(torch.tensor(self.scaler.get_scale()))
        return found


def learning_rate(job: Job, index: int) -> None:
    job.optimizer.param_groups[0]["lr"] = 2.0 ** -(5 + index % 4)


def clip_threshold(job: Job, index: int) -> None:
    job.clip.fill_(0.03 * (1 + index % 5))


def loss_scale(job: Job, index: int) -> None:
    if index in (5, 8):
        job.scaler.update(2.0 ** (3 * index))


def weight_decay_in_the_step(job: Job, index: int) -> None:
    job.kept.fill_(1 - 2.0**-6 * 0.01 * index)


DECAYS = (0.125, 0.1, 0.0, 0.3, 0.07, 0.3, 0.3, 0.0, 0.1, 0.3, 0.9, 0.01)


def weight_decay_of_each_step(job: Job, index: int) -> None:
    job.optimizer.param_groups[0]["weight_decay"] = DECAYS[index]


def weight_decay_that_begins_to_change(job: Job, index: int) -> None:
    job.optimizer.param_groups[0]["weight_decay"] = 0.125 if index < 5 else DECAYS[index]


def weight_decay_that_changes_at_the_capture(job: Job, index: int) -> None:
    job.optimizer.param_groups[0]["weight_decay"] = 0.125 if index < 3 else 0.01 * index


def weight_decay_twice(job: Job, index: int) -> None:
    job.optimizer.param_groups[0]["weight_decay"] = (0.125, 0.5, 0.25)[index // 5]


def is_followed(device: torch.device, build: Any) -> bool:
    """Kernels of Adam on a GPU may round some elements otherwise than others: their decay is captured anew then."""
    may_differ = device.type == "cuda" and build in (adam, adam_that_maximizes)
    return not may_differ or type_of_number("Adam", {"fused": True}, torch.float32, device) is not None


def compared(device: torch.device, change: Callable[[Job, int], None], **options: Any) -> Any:
    plain, graphed = Job(device, **options), Job(device, **options)
    step = graphstep.graph_step(graphed.step)
    expected, found = plain.trace(plain.step, change), graphed.trace(step, change)
    assert all(map(torch.equal, expected, found))
    unchanged = Job(device, **options)
    assert not all(map(torch.equal, expected, unchanged.trace(unchanged.step, lambda *_: None))), "it matters"
    row = step.report().rows[0]
    step.close()
    return row


@pytest.mark.parametrize("change", [learning_rate, clip_threshold, loss_scale])
def test_what_lies_on_the_device_is_followed_without_another_capture(device: torch.device, change: Any) -> None:
    row = compared(device, change)
    assert row.num_replays == NUM_STEPS - 3
    assert dict(row.eager_calls) == {"warmup": 3}


def test_weight_decay_that_the_step_applies_from_a_tensor_is_followed(device: torch.device) -> None:
    row = compared(device, weight_decay_in_the_step, decays_in_the_step=True)
    assert row.num_replays == NUM_STEPS - 3


def test_weight_decay_with_a_schedule_is_followed_without_another_capture(device: torch.device) -> None:
    """The warmup shows that it changes; values come back, among them those of the capture, and none."""
    row = compared(device, weight_decay_of_each_step)
    assert row.num_replays == NUM_STEPS - 3
    assert dict(row.eager_calls) == {"warmup": 3}


def test_weight_decay_that_begins_to_change_is_captured_anew_once(device: torch.device) -> None:
    """Until then it is a number in the kernel, which costs nothing."""
    row = compared(device, weight_decay_that_begins_to_change)
    assert row.num_replays == NUM_STEPS - 4
    assert row.eager_calls["warmup after a change of weight_decay of an optimizer"] == 1


def test_weight_decay_that_changes_when_it_is_captured_is_followed_from_then_on(device: torch.device) -> None:
    row = compared(device, weight_decay_that_changes_at_the_capture)
    assert row.num_replays == NUM_STEPS - 3


@pytest.mark.parametrize("build", ADDING)
def test_weight_decay_that_is_added_to_gradients_is_followed(device: torch.device, build: Any) -> None:
    def change(job: Job, index: int) -> None:
        job.optimizer.param_groups[0]["weight_decay"] = 0.125 / (1 + index)

    row = compared(device, change, build=build)
    if is_followed(device, build):
        assert row.num_replays == NUM_STEPS - 3
        assert dict(row.eager_calls) == {"warmup": 3}
    else:
        assert row.eager_calls["warmup after a change of weight_decay of an optimizer"]


@pytest.mark.parametrize("build", ADDING)
@pytest.mark.parametrize("first", [3, 6])
def test_it_is_followed_from_the_first_change(device: torch.device, build: Any, first: int) -> None:
    """A change just before the capture costs nothing; one after it costs one eager call, and no other does."""

    def change(job: Job, index: int) -> None:
        job.optimizer.param_groups[0]["weight_decay"] = 0.125 if index < first else 0.01 * index

    row = compared(device, change, build=build)
    assert row.num_replays == NUM_STEPS - 3 - (first > 3) or not is_followed(device, build)


def test_added_weight_decay_of_zero_is_captured_anew(device: torch.device) -> None:
    def change(job: Job, index: int) -> None:
        job.optimizer.param_groups[0]["weight_decay"] = 0.0 if 5 <= index < 8 else 0.01 * (index + 1)

    assert compared(device, change, build=sgd).num_replays == NUM_STEPS - 3 - 2


def test_added_weight_decay_of_gradients_that_the_kernel_unscales_is_captured_anew(device: torch.device) -> None:
    row = compared(device, weight_decay_twice, build=adam, unscales=False)
    assert row.num_replays == NUM_STEPS - 3 - 2


def momentum(group: dict[str, Any]) -> None:
    group.update(momentum=0.5)


def no_momentum(group: dict[str, Any]) -> None:
    group.update(momentum=0.0, nesterov=False)


def dampening(group: dict[str, Any]) -> None:
    group.update(dampening=0.25, nesterov=False)


def betas(group: dict[str, Any]) -> None:
    group.update(betas=(0.5, 0.75))


def eps(group: dict[str, Any]) -> None:
    group.update(eps=0.5)


@pytest.mark.parametrize(
    ("build", "number"),
    [
        (sgd_with_momentum, momentum),
        (sgd_with_momentum, no_momentum),
        (sgd_with_momentum, dampening),
        (sgd, momentum),
        (adam, betas),
        (adamw, betas),
        (adam, eps),
    ],
)
def test_other_numbers_are_captured_anew(device: torch.device, build: Any, number: Any) -> None:
    def change(job: Job, index: int) -> None:
        if index == 6:
            number(job.optimizer.param_groups[0])

    row = compared(device, change, build=build)
    assert row.num_replays == NUM_STEPS - 3 - 1


@pytest.mark.parametrize("build", [adamw, *ADDING])
@pytest.mark.parametrize("kind", ["number", "tensor on the device", "tensor on the host"])
def test_the_rate_of_each_optimizer_is_followed(device: torch.device, build: Any, kind: str) -> None:
    """A number, or a tensor that is written in place, as a scheduler does."""

    def change(job: Job, index: int) -> None:
        group = job.optimizer.param_groups[0]
        rate = 2.0 ** -(5 + index % 4)
        if kind == "number":
            group["lr"] = rate
            return
        if index == 0:
            group["lr"] = torch.tensor(2.0**-6, device="cpu" if kind == "tensor on the host" else device)
        group["lr"].fill_(rate)

    row = compared(device, change, build=build)
    assert row.num_replays == NUM_STEPS - 3
    assert dict(row.eager_calls) == {"warmup": 3}


def test_weight_decay_of_half_precision_weights_is_captured_anew(device: torch.device) -> None:
    """The fused kernel does not round between decay and update, so that nothing before it gives its bits."""
    row = compared(device, weight_decay_twice, dtype=torch.bfloat16)
    assert row.num_replays == NUM_STEPS - 5
    assert row.eager_calls["warmup after a change of weight_decay of an optimizer"] == 2
