"""RMSprop with its defaults."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)
optimizer = torch.optim.RMSprop(layer.parameters(), lr=0.01)


def step(x):
    optimizer.zero_grad()
    layer(x).square().sum().backward()
    optimizer.step()  # expect: GS-O001
