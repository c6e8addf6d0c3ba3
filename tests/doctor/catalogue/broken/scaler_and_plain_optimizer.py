"""A gradient scaler with an optimizer that does not scale."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu")


def step(x):
    optimizer.zero_grad()
    scaler.scale(layer(x).sum()).backward()
    scaler.step(optimizer)  # expect: GS-O004
    scaler.update()
