"""Clipping of one's own with a number of Python."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)


def step(x):
    optimizer.zero_grad()
    layer(x).square().sum().backward()
    norm = torch.cat([p.grad.flatten() for p in layer.parameters()]).norm()
    scale = min(1.0, 1.0 / norm.item())  # expect: GS-H001
    for parameter in layer.parameters():
        parameter.grad.mul_(scale)
    optimizer.step()
