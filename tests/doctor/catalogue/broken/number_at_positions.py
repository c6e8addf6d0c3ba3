"""A number is written at positions."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


rows = torch.tensor([1, 3])


def step(x):
    y = x.clone()
    y[rows] = 0.0  # expect: GS-T004
    layer(y).sum().backward()
