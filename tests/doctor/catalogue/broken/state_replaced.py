"""A frozen dataclass is replaced by one that counts on."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


@dataclasses.dataclass(frozen=True)
class State:
    count: int = 0


state = State()


def step(x):
    global state  # noqa: PLW0603
    state = dataclasses.replace(state, count=state.count + 1)  # expect: GS-Y001
    (layer(x) / state.count).sum().backward()
