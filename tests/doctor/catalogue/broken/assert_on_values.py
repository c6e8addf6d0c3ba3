"""An assertion about values."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    assert (x.abs() < 100).all(), "out of range"  # expect: GS-H002
    layer(x).sum().backward()
