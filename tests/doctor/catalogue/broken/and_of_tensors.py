"""Tensors joined with and."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    y = layer(x)
    both = y.max() > 0 and y.min() < 0  # expect: GS-H002
    y.sum().backward()
    return both
