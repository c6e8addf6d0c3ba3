"""A loop until a norm is small."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    y = layer(x)
    while y.norm() > 1:  # expect: GS-H002
        y = y / 2
    y.sum().backward()
