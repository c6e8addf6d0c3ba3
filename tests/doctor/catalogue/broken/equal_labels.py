"""Two tensors are compared on the host."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    y = layer(x)
    if torch.allclose(x, y.detach()):  # expect: GS-H008
        y = y * 2
    y.sum().backward()
