"""Clipping on the device; the norm is returned."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, fused=True)


def step(x):
    optimizer.zero_grad()
    layer(x).sum().backward()
    norm = nn.utils.clip_grad_norm_(layer.parameters(), 1.0)
    optimizer.step()
    return norm
