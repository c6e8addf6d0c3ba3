"""Known faults of arguments: one tensor for several of them, objects with slots, new objects, and modes of the call."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.plain import (
    HIDDEN,
    LAYERS,
    Stack,
    attached,
    built,
    inputs,
    num_replays,
    reasons,
    same,
    train,
)
from tests.strategies.runs import differences
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from graphstep.errors import StaleAddressError


class Compares(nn.Module):
    """Takes another way where both arguments are one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        y: Tensor = self.linear(query)
        return y * 2 if query is key else y + key


class Projects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = torch.softmax(self.query(query) @ self.key(key).transpose(-1, -2), -1)
        return weights @ self.value(value)


class SelfAttention(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, 2, dropout=dropout, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x, x, x, need_weights=False)
        return x + y


def test_two_arguments_that_are_one_tensor(device: torch.device) -> None:
    build = partial(Stack, block=Compares, call=lambda layer, x, index: layer(x, x))
    assert same(device, build, replays=2 * 4 * 2) == {"observed": 2 * 2}


def test_three_arguments_that_are_one_tensor(device: torch.device) -> None:
    build = partial(Stack, block=Projects, call=lambda layer, x, index: layer(x, x, x))
    assert same(device, build, replays=2 * 4 * 2) == {"observed": 2 * 2}


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_self_attention_of_the_library(device: torch.device, dropout: float) -> None:
    build = partial(Stack, block=partial(SelfAttention, dropout))
    same(device, build, regions={"layers.*.attention": "attn"}, replays=2 * 4 * 2)


def test_two_arguments_that_are_one_tensor_in_some_steps(device: torch.device) -> None:
    """Another signature, which is captured too when it comes back."""
    step = 0

    def before(number: int) -> None:
        nonlocal step
        step = number

    def call(layer: nn.Module, x: Tensor, index: int) -> Tensor:
        result: Tensor = layer(x, x if step % 2 else x.clone())
        return result

    found = same(
        device, partial(Stack, 1, Compares, call), num_microbatches=1, num_steps=8, before=before, replays=3 + 2
    )
    assert found == {"observed": 1, "another signature": 2}


class Slots:
    """Can be looked into, although it has no dictionary."""

    __slots__ = ("bias", "scale")

    def __init__(self) -> None:
        self.scale, self.bias = 1.0, torch.zeros(HIDDEN)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, context: Any = None) -> Tensor:
        y = torch.tanh(self.linear(x))
        return y * context.scale + context.bias if isinstance(context, Slots) else y


@pytest.mark.parametrize("policy", ["auto", "required"])
def test_an_object_with_slots_that_changes(device: torch.device, policy: str) -> None:
    """Its number is part of the signature, and its tensor is copied in."""
    context = Slots()

    def before(step: int) -> None:
        context.scale, context.bias = 1.0 + step % 2, inputs(device, step)[0, 0]

    build = partial(Stack, block=Scaled, call=lambda layer, x, index: layer(x, context))
    config = {"policy": policy}
    found = same(device, build, num_microbatches=1, num_steps=8, before=before, config=config, replays=2 * (3 + 2))
    assert found == {"observed": 2, "another signature": 2 * 2}


class Opaque:
    """Called by the forward, and so never looked into."""

    def __call__(self) -> None:
        pass


def test_new_objects_in_each_step_are_let_go_of(device: torch.device) -> None:
    """What is counted of signatures that never come back has a bound."""
    seen: list[weakref.ref[Opaque]] = []

    def call(layer: nn.Module, x: Tensor, index: int) -> Tensor:
        context = Opaque()
        seen.append(weakref.ref(context))
        result: Tensor = layer(x, context)
        return result

    model = built(partial(Stack, block=Scaled, call=call), device)
    with attached(model, LAYERS) as manager:
        train(model, device, 200)
        gc.collect()
        assert reasons(manager) == {"observed": 2, "another signature": 2 * 199}
        # Those of the first step belong to the signature that is captured.
        assert [each() for each in seen[2 : 2 * 100]] == [None] * (2 * 99)
    del manager
    gc.collect()
    assert [each() for each in seen] == [None] * (2 * 200)


def test_a_weight_that_was_replaced_while_a_loss_is_in_flight(device: torch.device) -> None:
    """The error names it, and what is in flight stays right."""
    gradients = []
    for is_attached in (False, True):
        model = built(partial(Stack, 1, Scaled), device)
        with attached(model, LAYERS) if is_attached else nullcontext() as manager:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                losses = [model(inputs(device, 2 * step + number)) for number in range(2)]
                optimizer.zero_grad()
                sum(losses).backward()
                del losses
                optimizer.step()
            optimizer.zero_grad()
            loss = model(inputs(device, 10))
            old = model.layers[0].linear.weight
            if manager is not None:
                before = num_replays(manager)
                assert before > 0
                model.layers[0].linear.weight = nn.Parameter(old.detach() + 1)
                with pytest.raises(StaleAddressError, match=r"layers\.0\.linear\.weight"):
                    model(inputs(device, 11))
                assert num_replays(manager) == before
                model.layers[0].linear.weight = old
            loss.backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
            del loss
    assert all(map(torch.equal, *gradients))


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).unsqueeze(1)
        return x + scaled_dot_product_attention(y, y, y).squeeze(1)


def test_kernels_of_attention_that_are_not_those_of_the_capture(device: torch.device) -> None:
    """Which ones are allowed is part of the signature."""
    traces = []
    for is_attached in (False, True):
        model = built(partial(Stack, 1, Attends), device)
        with attached(model, LAYERS) if is_attached else nullcontext() as manager:
            trace = train(model, device, 3, feed=lambda number: inputs(device, number, length=40))
            with sdpa_kernel(SDPBackend.MATH):
                trace += train(model, device, 5, feed=lambda number: inputs(device, number, length=40))
            traces.append(trace)
            if manager is not None:
                assert num_replays(manager) == 2 + 3
                assert reasons(manager) == {"observed": 1, "another signature": 2}
    assert differences(*traces) == []
