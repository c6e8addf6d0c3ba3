"""Several shapes a region, and any number of microbatches: captured when it pays, eager and counted when not."""

from __future__ import annotations

import itertools
import random
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.attached import WITH_DROPOUT, Loop, schedule, twins
from tests.strategies.attach.plain import HIDDEN, LAYERS, attached, inputs
from tests.strategies.models import any_order
from tests.strategies.runs import steps
from torch import nn

from graphstep.capture.reasons import EagerReason


@pytest.mark.parametrize("order", ["fbfb", "ffbb"])
def test_bucketed_lengths(device: torch.device, order: str) -> None:
    """After two rounds every bucket replays."""
    replays = []

    def script(loop: Loop) -> None:
        for _ in range(5):
            for length in (6, 4, 8):
                loop.step(2, length=length)
            replays.append(loop.num_replays if loop.graphs else 0)

    loop = twins(device, script, build=WITH_DROPOUT, schedule=schedule(order))
    assert [after - before for before, after in itertools.pairwise(replays[7:])] == [2 * 2 * 3] * 2
    num_slots = 2 if order == "ffbb" else 1
    assert [row.num_recordings for row in loop.report.rows] == [2 * 3 * num_slots] * 2


def test_lengths_that_differ_within_a_step(device: torch.device) -> None:
    def script(loop: Loop) -> None:
        for _ in range(5):
            loop.step(batches=[loop.batch(length=length) for length in (6, 9, 6, 4)])

    assert twins(device, script, build=WITH_DROPOUT).num_replays == 2 * 4 * 4


def test_lengths_that_differ_in_flight(device: torch.device) -> None:
    def script(loop: Loop) -> None:
        for step in range(7):
            lengths = (6, 9, 6) if step % 2 else (9, 9, 6)
            loop.step(batches=[loop.batch(length=length) for length in lengths])

    loop = twins(device, script, build=WITH_DROPOUT, schedule=schedule("ffbfbb", "fffbbb"))
    assert loop.num_replays > 2 * 3 * 3


def test_a_thousand_random_lengths(device: torch.device) -> None:
    """Never more graphs than allowed, and every result right."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(HIDDEN, 1)])

        def forward(self, x: Any) -> Any:
            return self.layers[0](x).sum()

    model = Model().to(device)
    weight, bias = model.layers[0].weight, model.layers[0].bias
    dice = random.Random(0)
    data = inputs(device, 0, size=1, length=200)
    with attached(model, LAYERS, max_signatures=3, warmup_steps=0) as manager:
        for _ in range(1000):
            x = data[:, : dice.choice([dice.randint(1, 200), 7, 7, 150])]
            weight.grad = bias.grad = None
            loss = model(x)
            loss.backward()
            expected = x.sum((0, 1)) @ weight[0] + bias * x.shape[1]
            assert torch.allclose(loss, expected, rtol=1e-4, atol=1e-3)
            assert bias.grad is not None
            assert float(bias.grad) == x.shape[1]
            manager.end_step()
        (row,) = manager.report().rows
        assert row.num_recordings <= 2 * 3
        assert row.num_replays > 300
        assert row.num_replays + sum(row.eager_calls.values()) == 1000


def test_a_shorter_last_batch(device: torch.device) -> None:
    """Every epoch ends with one: eager twice, then captured."""

    def script(loop: Loop) -> None:
        for _ in range(4):
            for size in (4, 4, 4, 1):
                loop.step(1, size=size)

    loop = twins(device, script, build=WITH_DROPOUT)
    assert loop.num_replays == 2 * (3 * 4 - 1 + 2)


@pytest.mark.parametrize("on_mismatch", ["eager", "recapture"])
def test_a_last_microbatch_that_is_smaller(device: torch.device, on_mismatch: str) -> None:
    def script(loop: Loop) -> None:
        for step in range(6):
            sizes = (2, 2, 1) if step == 3 else (2, 2, 2)
            loop.step(batches=[loop.batch(size=size) for size in sizes])

    config = {"on_mismatch": on_mismatch}
    loop = twins(device, script, build=WITH_DROPOUT, config=config)
    assert loop.num_eager == 2 * 3 + 2
    assert loop.num_replays == 2 * (5 * 3 - 1)


@pytest.mark.parametrize("ends_steps", [False, True])
def test_the_number_of_microbatches_changes(device: torch.device, ends_steps: bool) -> None:
    """One after another they need one slot, however many there are."""

    def script(loop: Loop) -> None:
        for number in (4, 6, 3, 1, 8):
            loop.step(number)

    loop = twins(device, script, build=WITH_DROPOUT, ends_steps=ends_steps)
    assert loop.num_eager == 2 * 4
    assert loop.num_replays == 2 * (6 + 3 + 1 + 8)
    assert [row.num_recordings for row in loop.report.rows] == [2, 2]


ALL_IN_FLIGHT = tuple("f" * number + "b" * number for number in (1, 2, 3, 4, 6))


def test_fewer_in_flight_than_seen(device: torch.device) -> None:
    def script(loop: Loop) -> None:
        for number in (4, 3, 1, 2, 4):
            loop.step(number)

    loop = twins(device, script, build=WITH_DROPOUT, schedule=schedule(*ALL_IN_FLIGHT))
    assert loop.num_eager == 2 * 4
    assert loop.num_replays == 2 * (3 + 1 + 2 + 4)


@pytest.mark.parametrize("ends_steps", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_more_in_flight_than_seen(device: torch.device, num_layers: int, ends_steps: bool) -> None:
    """Eager and counted at first, captured on demand; at last every call replays."""
    eager = []

    def script(loop: Loop) -> None:
        for number in (4, 6, 3, 6, 6, 6, 4):
            loop.step(number)
            eager.append(loop.num_eager if loop.graphs else 0)

    build = partial(WITH_DROPOUT, num_layers=num_layers)
    loop = twins(device, script, build=build, schedule=schedule(*ALL_IN_FLIGHT), ends_steps=ends_steps)
    assert eager[-1] == eager[-3]
    assert EagerReason.MORE_IN_FLIGHT in loop.reasons()
    assert [row.num_recordings for row in loop.report.rows] == [2 * 6] * num_layers


@pytest.mark.parametrize("order", ["ffbfbfbb", "fffbfbbb", "fbffbbfb"])
def test_as_many_slots_as_in_flight(device: torch.device, order: str) -> None:
    loop = twins(device, steps(5, 4), build=WITH_DROPOUT, schedule=schedule(order))
    in_flight = [order[:end].count("f") - order[:end].count("b") for end in range(len(order))]
    assert [row.num_recordings for row in loop.report.rows] == [2 * max(in_flight)] * 2
    assert loop.num_replays == 2 * 4 * 4


def interleaved(loop: Loop) -> None:
    """Two halves of a model as two chunks of a pipeline: forwards and backwards of both take turns."""
    model = loop.model
    for _ in range(5):
        loop.optimizer.zero_grad()
        losses, waiting = [], []
        for step in ("f0", "f0", "f1", "f0", "f1", "b1", "b0", "f1", "b1", "b1", "b0", "b0"):
            if step == "f0":
                batch = {name: value.to(loop.device) for name, value in loop.batch().items()}
                hidden = model.layers[0](model.embedding(batch["tokens"]))
                waiting.append({"hidden": hidden, "cut": hidden.detach().requires_grad_(), "labels": batch["labels"]})
            elif step == "f1":
                microbatch = next(each for each in waiting if "loss" not in each)
                logits = model.norm(model.layers[1](microbatch["cut"])) @ model.embedding.weight.t()
                loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), microbatch["labels"].flatten())
                microbatch["loss"] = loss
                losses.append(loss.detach())
            elif step == "b1":
                next(each for each in waiting if "sent" not in each)["loss"].backward()
                next(each for each in waiting if "sent" not in each)["sent"] = True
            else:
                microbatch = waiting.pop(0)
                microbatch["hidden"].backward(microbatch["cut"].grad)
        loop.note(torch.stack(losses))
        loop.optimizer.step()


def test_interleaved_chunks(device: torch.device) -> None:
    assert twins(device, interleaved, build=WITH_DROPOUT).num_replays == 2 * 3 * 4


@pytest.mark.parametrize("seed", range(8))
def test_any_order_and_any_length(device: torch.device, seed: int) -> None:
    def script(loop: Loop) -> None:
        dice = random.Random(seed)
        for _ in range(10):
            number = dice.choice(counts)
            loop.step(batches=[loop.batch(length=dice.choice([6, 6, 4])) for _ in range(number)])

    dice = random.Random(seed)
    orders = [any_order(dice, num_microbatches=4, in_flight=3) for _ in range(5)]
    counts = sorted({order.count("f") for order in orders})
    build = partial(WITH_DROPOUT, num_layers=1)
    config = {"max_signatures": 2, "capture_after": 1}
    assert twins(device, script, build=build, config=config, schedule=schedule(*orders)).num_replays > 0
