"""Known faults of results: kept, left out of a loss, or the memory of an argument, a parameter or a buffer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.strategies.attach.attached import Loop, schedule, twins
from tests.strategies.attach.plain import LAYERS
from tests.strategies.models import HIDDEN, Decoder
from tests.strategies.runs import steps
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import graphstep
from graphstep.capture.reasons import EagerReason
from graphstep.config import CudaGraphConfig

Uses = Callable[[int], bool]
USES: dict[str, Uses] = {
    "always": lambda call: True,
    "never": lambda call: False,
    "at first": lambda call: call < 4,
    "later": lambda call: call >= 4,
    "not in every third call": lambda call: call % 3 != 2,
}
ORDERS = {1: ("fb",), 2: ("ffBB",)}
"""By how many microbatches are in flight."""
PLACES = ("R", "RR", "PR", "RP", "PRRP")
"""Chains of the layer in question and of plain ones."""


class Plain(nn.Module):
    """One result, in a tuple as those of all layers here."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (self.hidden(x),)


class Mean(Plain):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.hidden(x)
        return y, y.square().mean()


class Twice(Plain):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.hidden(x)
        return y, y


class Head(Plain):
    """The second result has parameters of its own."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.head, self.dropout = nn.Linear(HIDDEN, HIDDEN), dropout

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = functional.dropout(self.hidden(x), self.dropout, self.training)
        return y, self.head(y)


class OwnBias(Plain):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.hidden(x), self.linear.bias


class Unchanged(Plain):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x, self.hidden(x)


class NoParameters(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x, torch.tanh(x)


class Counter(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.calls.add_(1)
        return self.hidden(x), self.calls


class Rest(Decoder):
    """What its layers return beside the hidden states is part of the loss in some calls only."""

    def __init__(self, *kinds: Callable[[], nn.Module], uses: Uses) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList(kind() for kind in kinds)
        self.uses, self.num_calls = uses, 0

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x, rest = self.embedding(tokens), []
        for layer in self.layers:
            x, *others = layer(x)
            rest += others
        is_used = self.uses(self.num_calls)
        self.num_calls += 1
        logits = functional.linear(self.norm(x), self.embedding.weight)
        loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        return loss + sum(each.float().square().mean() for each in rest) if is_used else loss


def same(
    device: torch.device, *kinds: Callable[[], nn.Module], uses: str = "always", in_flight: int = 1, **options: Any
) -> Loop:
    build = partial(Rest, *kinds, uses=USES[uses])
    options = {"build": build, "regions": LAYERS, "schedule": schedule(*ORDERS[in_flight]), **options}
    loop = twins(device, steps(6, in_flight), **options)
    assert all(row.num_replays for row in loop.report.rows), loop.reasons()
    return loop


def chain(places: str, kind: Callable[[], nn.Module]) -> list[Callable[[], nn.Module]]:
    return [Plain if place == "P" else kind for place in places]


class Pooled(Decoder):
    """From the third call on, the second layer gets another shape."""

    def __init__(self) -> None:
        super().__init__(0)
        self.layers, self.num_calls = nn.ModuleList(Plain() for _ in range(2)), 0

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        (hidden,) = self.layers[0](self.embedding(tokens))
        (y,) = self.layers[1](hidden if self.num_calls < 2 else hidden.mean(0, keepdim=True))
        self.num_calls += 1
        result: Tensor = y.square().mean() + hidden.square().mean()
        return result


def test_a_held_result_after_the_graphs_of_the_next_layer_were_evicted(device: torch.device) -> None:
    def script(loop: Loop) -> None:
        def keep(_module: nn.Module, _inputs: object, result: tuple[Tensor, ...]) -> None:
            if loop.model.num_calls >= 8:
                loop.kept.append(result[0].detach())

        loop.model.layers[0].register_forward_hook(keep)
        for _ in range(14):
            loop.step()

    loop = twins(device, script, build=Pooled, regions=LAYERS, config={"max_signatures": 1, "capture_after": 1})
    assert [row.num_evictions for row in loop.report.rows] == [0, 1]


def tied(*kinds: Callable[[], nn.Module], uses: str) -> nn.Module:
    model = Rest(*kinds, uses=USES[uses])
    model.layers[1].linear.weight = model.layers[0].linear.weight
    return model


def hooked(*kinds: Callable[[], nn.Module], uses: str) -> nn.Module:
    model = Rest(*kinds, uses=USES[uses])
    model.layers[0].linear.weight.register_hook(lambda gradient: gradient.clone())
    return model


@pytest.mark.parametrize("in_flight", ORDERS)
@pytest.mark.parametrize("build", [tied, hooked])
def test_an_unused_result_where_autograd_accumulates_a_weight(
    device: torch.device, build: Callable[..., nn.Module], in_flight: int
) -> None:
    uses = "not in every third call"
    loop = same(device, in_flight=in_flight, build=partial(build, Mean, Mean, uses=uses))
    again = sum(row.eager_calls[EagerReason.PARTIAL_BACKWARD] for row in loop.report.rows)
    num_unused = sum(not USES[uses](call) for call in range(in_flight, 6 * in_flight))
    assert again == 2 * num_unused
    assert loop.num_eager - again == 2 * in_flight


@pytest.mark.parametrize("places", ["RP", "RR", "PR"])
@pytest.mark.parametrize("build", [tied, hooked])
def test_a_result_that_is_there_twice_where_autograd_accumulates_a_weight(
    device: torch.device, build: Callable[..., nn.Module], places: str
) -> None:
    same(device, build=partial(build, *chain(places, Twice), uses="never"))


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")
def test_an_unused_result_under_data_parallel(device: torch.device) -> None:
    def build() -> nn.Module:
        return DistributedDataParallel(Rest(Mean, Mean, uses=USES["not in every third call"]).to(device))

    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        same(device, build=build, regions={"module.layers.*": "layer"})
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("in_flight", ORDERS)
@pytest.mark.parametrize("uses", ["at first", "not in every third call"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_parameter_that_gets_no_gradient_in_a_step_has_none(
    device: torch.device, dropout: float, uses: str, in_flight: int
) -> None:
    """And the optimizer skips it: its weight decay would change it otherwise."""
    loop = same(device, partial(Head, dropout), uses=uses, in_flight=in_flight)
    assert loop.num_replays == 5 * in_flight
    if (uses, in_flight) != ("not in every third call", 2):  # There one microbatch of each step uses it.
        assert any(taken["layers.0.head.weight.grad"] is None for taken in loop.trace)


@pytest.mark.parametrize("uses", ["never", "later"])
@pytest.mark.parametrize("places", ["R", "RP", "PR"])
@pytest.mark.parametrize("kind", [Head, Unchanged])
def test_a_parameter_that_got_no_gradient_in_the_first_step_either(
    device: torch.device, kind: type[Plain], places: str, uses: str
) -> None:
    same(device, *chain(places, kind), uses=uses)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_parameter_that_gets_no_gradient_in_a_layer_between_others(device: torch.device, dropout: float) -> None:
    head = partial(Head, dropout)
    same(device, head, head, head, uses="not in every third call")


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("in_flight", ORDERS)
def test_a_main_grad_that_gets_no_gradient_in_a_step(device: torch.device, in_flight: int, dropout: float) -> None:
    def script(loop: Loop) -> None:
        assert loop.buffers is not None
        for _ in range(6):
            loop.step(in_flight)
            with torch.no_grad():
                for slot in loop.buffers.slots:
                    slot.parameter.sub_(slot.view, alpha=0.1)

    build = partial(Rest, partial(Head, dropout), uses=USES["not in every third call"])
    options = {"schedule": schedule(*ORDERS[in_flight]), "zero": "buffers", "dtype": torch.bfloat16}
    loop = twins(device, script, build=build, regions=LAYERS, **options)
    assert loop.num_replays == 5 * in_flight


@pytest.mark.parametrize("merge_layers", [1, 0])
@pytest.mark.parametrize("in_flight", ORDERS)
@pytest.mark.parametrize("uses", ["always", "never", "at first", "later"])
@pytest.mark.parametrize("places", ["R", "PR", "RP"])
def test_a_result_that_is_a_parameter(
    device: torch.device, places: str, uses: str, in_flight: int, merge_layers: int
) -> None:
    same(device, *chain(places, OwnBias), uses=uses, in_flight=in_flight, config={"merge_layers": merge_layers})


def test_a_parameter_that_is_returned_has_no_hooks_after_close(device: torch.device) -> None:
    layer = OwnBias().to(device)
    holder = nn.ModuleList([layer])
    optimizer = torch.optim.SGD(holder.parameters(), lr=0.1)
    with graphstep.attach(holder, CudaGraphConfig(impl="local", warmup_steps=1), regions={"*": "layer"}) as manager:
        for _ in range(4):
            y, bias = layer(torch.randn(3, HIDDEN, device=device))
            (y.square().mean() + bias.square().mean()).backward()
            del y, bias
            optimizer.step()
            optimizer.zero_grad()
        assert manager.report().rows[0].num_replays == 3
    for parameter in layer.parameters():
        assert not parameter._backward_hooks
        assert not parameter._post_accumulate_grad_hooks


@pytest.mark.parametrize("in_flight", ORDERS)
@pytest.mark.parametrize("uses", ["always", "not in every third call"])
@pytest.mark.parametrize("places", PLACES)
def test_a_result_that_is_the_argument(device: torch.device, places: str, uses: str, in_flight: int) -> None:
    same(device, *chain(places, Unchanged), uses=uses, in_flight=in_flight)


@pytest.mark.parametrize("in_flight", ORDERS)
@pytest.mark.parametrize("uses", ["never", "later"])
@pytest.mark.parametrize("places", PLACES)
def test_a_result_that_is_the_argument_and_the_only_one_used(
    device: torch.device, places: str, uses: str, in_flight: int
) -> None:
    same(device, *chain(places, NoParameters), uses=uses, in_flight=in_flight)


@pytest.mark.parametrize("in_flight", ORDERS)
@pytest.mark.parametrize("uses", ["always", "never", "later"])
@pytest.mark.parametrize("places", PLACES)
def test_a_result_that_is_a_buffer(device: torch.device, places: str, uses: str, in_flight: int) -> None:
    same(device, *chain(places, Counter), uses=uses, in_flight=in_flight)
