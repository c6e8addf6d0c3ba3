"""Gradients of two microbatches are added."""

from __future__ import annotations

import torch
from torch import nn

layer = nn.Linear(4, 4)
optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3, fused=True)
batches = [torch.randn(2, 8, 4) for _ in range(4)]


def step(x):
    optimizer.zero_grad()
    losses = []
    for microbatch in x:
        loss = layer(microbatch).square().mean() / 2
        loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    return torch.stack(losses)
