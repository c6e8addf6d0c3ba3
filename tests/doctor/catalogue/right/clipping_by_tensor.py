"""Clipping by a threshold in a tensor, which is not read back."""

from __future__ import annotations

import torch
from torch import nn

import graphstep

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)
threshold = torch.tensor(1.0)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9, fused=True)


def step(x):
    optimizer.zero_grad()
    layer(x).sum().backward()
    norm = graphstep.clip_grad_norm_(layer.parameters(), threshold)
    optimizer.step()
    return norm
