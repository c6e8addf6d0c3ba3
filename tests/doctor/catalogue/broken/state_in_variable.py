"""A hidden state is carried in a variable."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


state = torch.zeros(8, 4)


def step(x):
    global state  # noqa: PLW0603
    state = torch.tanh(x + state)  # expect: GS-Y004
    layer(state).sum().backward()
