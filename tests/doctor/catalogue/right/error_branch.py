"""A check of shapes with an error that formats nothing of the device."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    if x.dim() != 2:
        raise ValueError(f"expected two dimensions, got {x.dim()}")
    layer(x).sum().backward()
