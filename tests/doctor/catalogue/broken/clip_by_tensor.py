"""A clip threshold in a tensor, of which torch makes a number."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)
threshold = torch.tensor(1.0)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)


def step(x):
    optimizer.zero_grad()
    layer(x).square().sum().backward()
    nn.utils.clip_grad_norm_(layer.parameters(), threshold)  # expect: GS-O003
    optimizer.step()
