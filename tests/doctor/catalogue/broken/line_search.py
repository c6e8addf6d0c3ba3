"""LBFGS searches along a line."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)
optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=2)


def step(x):
    def closure():
        optimizer.zero_grad()
        loss = layer(x).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)  # expect: GS-O005
