"""A small network with a fused optimizer."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss
