"""Programs put together at random: views of views, writes through them, random numbers, modes, backward passes."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from tests.engine.programs import Program, assert_replays_equal_eager
from torch import Tensor

from graphstep.engine import TapeEngine

NUM_PROGRAMS = 40
SIZE = 4

# All take and give [4, 4] tensors. Each gets the tensors so far and a source of choices.
Action = Callable[[list[Tensor], random.Random], Any]


def pick(pool: list[Tensor], choice: random.Random) -> Tensor:
    return choice.choice(pool)


def strided(tensor: Tensor) -> Tensor:
    return tensor.as_strided((SIZE, SIZE), (1, SIZE)) if tensor.is_contiguous() else tensor.t()


NEW: tuple[Action, ...] = (
    lambda p, c: pick(p, c) + pick(p, c),
    lambda p, c: (pick(p, c) @ pick(p, c)).tanh(),
    lambda p, c: pick(p, c).softmax(c.choice([0, 1])),
    lambda p, c: torch.cat([pick(p, c)[:2], pick(p, c)[2:]]),
    lambda p, c: pick(p, c).sort(c.choice([0, 1])).values,
    lambda p, c: torch.where(pick(p, c) > 0, pick(p, c), 0.5),
    lambda p, c: pick(p, c).cumsum(c.choice([0, 1])).sigmoid(),
    lambda p, c: torch.nn.functional.dropout(pick(p, c), 0.5),
    lambda p, c: torch.rand(SIZE, SIZE) * pick(p, c),
    lambda p, c: torch.nn.functional.layer_norm(pick(p, c), (SIZE,)),
    lambda p, c: pick(p, c).to(torch.bfloat16).float(),
    lambda p, c: pick(p, c).clone(),
    lambda p, c: pick(p, c).index_select(0, torch.tensor([c.randrange(SIZE) for _ in range(SIZE)])),
    lambda p, c: torch.full((SIZE, SIZE), c.random()),
    lambda p, c: pick(p, c).t().reshape(SIZE, SIZE).contiguous(),
    lambda p, c: torch.stack(pick(p, c).unbind(c.choice([0, 1]))),
    lambda p, c: torch.add(pick(p, c), pick(p, c), out=torch.empty(0)),
    lambda p, c: torch.func.grad(lambda v: (v**2).sum())(pick(p, c)),
    lambda p, c: torch.tensor([[c.random()] * SIZE] * SIZE).add_(pick(p, c)),
)
VIEWS: tuple[Action, ...] = (
    lambda p, c: pick(p, c).t(),
    lambda p, c: pick(p, c).flip(0)[::1],
    lambda p, c: pick(p, c)[c.randrange(SIZE)].expand(SIZE, SIZE),
    lambda p, c: pick(p, c).unfold(0, 1, 1).squeeze(-1),
    lambda p, c: strided(pick(p, c)),
    lambda p, c: pick(p, c).detach(),
    lambda p, c: pick(p, c).unsqueeze(0).transpose(0, 1).squeeze(1),
    lambda p, c: pick(p, c).narrow(1, 0, SIZE),
    lambda p, c: pick(p, c).unflatten(0, (2, 2)).flatten(0, 1),
)
WRITES: tuple[Action, ...] = (
    lambda t, c: t.mul_(0.5),
    lambda t, c: t[c.randrange(SIZE)].add_(1),
    lambda t, c: t.__setitem__((slice(None), c.randrange(SIZE)), c.random()),
    lambda t, c: t.diagonal().fill_(c.random()),
    lambda t, c: t.clamp_(-1, 1),
    lambda t, c: t.uniform_(),
    lambda t, c: t.t().tril_(),
    lambda t, c: t.masked_fill_(t > 0.5, 0.25),
    lambda t, c: t.__setitem__(t > 0.7, 0.1),
    lambda t, c: t.copy_(t.t().clone()),
)  # type: ignore[assignment]


def is_writable(tensor: Tensor) -> bool:
    overlaps = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return not overlaps and not tensor.requires_grad and not tensor.is_inference()


def perform(inputs: list[Tensor], weight: Tensor, choice: random.Random) -> list[Tensor]:
    """Some twenty actions, the same ones for the same source of choices."""
    pool = list(inputs)
    modes: tuple[Callable[[], AbstractContextManager[Any]], ...] = (nullcontext, torch.no_grad, torch.inference_mode)
    for _ in range(choice.randrange(8, 24)):
        kind = choice.random()
        with choice.choices(modes, (8, 1, 1))[0]():
            if kind < 0.45:
                pool.append(choice.choice(NEW)(pool, choice))
            elif kind < 0.7:
                pool.append(choice.choice(VIEWS)(pool, choice))
            elif kind < 0.9:
                writable = [tensor for tensor in pool if is_writable(tensor)]
                choice.choice(WRITES)(choice.choice(writable), choice)
            else:
                normal = [tensor for tensor in pool if not tensor.is_inference()]
                loss = (choice.choice(normal).clone() @ weight).square().mean()
                if loss.requires_grad:
                    loss.backward()
    return [tensor.detach() for tensor in pool]


@pytest.mark.parametrize("seed", range(NUM_PROGRAMS))
def test_random_program(tape: TapeEngine, seed: int) -> None:
    def build(device: torch.device) -> Program:
        inputs, state = [torch.randn(SIZE, SIZE) for _ in range(2)], torch.randn(SIZE, SIZE)
        weight = torch.randn(SIZE, SIZE, requires_grad=True)
        weight.grad = torch.zeros_like(weight)
        return Program(
            lambda: perform([*inputs, state], weight, random.Random(seed)), [*inputs, weight], [state, weight.grad]
        )

    assert_replays_equal_eager(tape, build)
