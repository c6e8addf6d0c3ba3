"""A gradient scaler with an optimizer that scales by itself."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)
optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
scaler = torch.amp.GradScaler("cpu")


def step(x):
    optimizer.zero_grad()
    scaler.scale(layer(x).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
