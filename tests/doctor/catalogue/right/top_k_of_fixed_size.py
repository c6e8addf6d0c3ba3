"""topk, gather and scatter of fixed sizes."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    y = layer(x)
    values, indices = y.topk(2, dim=-1)
    spread = torch.zeros_like(y).scatter(-1, indices, values.softmax(-1))
    (spread * y).sum().backward()
