"""A scheduler that steps outside."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def step(x):
    optimizer.zero_grad()
    layer(x).sum().backward()
    optimizer.step()
    return optimizer
