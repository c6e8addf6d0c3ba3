"""Gradients are scaled by replacing them."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)


def step(x):
    optimizer.zero_grad()
    layer(x).square().sum().backward()
    for parameter in layer.parameters():
        parameter.grad = parameter.grad / 2  # expect: GS-W009
    optimizer.step()
