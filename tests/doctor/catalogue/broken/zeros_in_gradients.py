"""Gradients are filled with zeros."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)


def step(x):
    optimizer.zero_grad(set_to_none=False)  # expect: GS-W011
    layer(x).sum().backward()
    optimizer.step()
