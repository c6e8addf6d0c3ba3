"""A moving average of the weights, in place, after the update."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer, average = nn.Linear(4, 4), nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)


def step(x):
    optimizer.zero_grad()
    layer(x).sum().backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(average.parameters(), layer.parameters(), strict=True):
            slow.lerp_(fast, 0.01)
