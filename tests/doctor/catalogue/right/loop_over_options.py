"""Python loops over numbers and lists that stay."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
SCALES = [1.0, 0.5, 0.25]


def step(x):
    for layer, scale in zip(layers, SCALES, strict=True):
        x = x + scale * layer(x)
    x.sum().backward()
