"""A variable of the module counts."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


num_steps = 0


def step(x):
    global num_steps  # noqa: PLW0603
    num_steps += 1  # expect: GS-Y001
    (layer(x) * num_steps).sum().backward()
