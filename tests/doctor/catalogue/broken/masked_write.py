"""Values are written where a mask is set."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


kept = torch.tensor([True, False] * 4)


def step(x):
    y = x.clone()
    y[kept] = 2 * x[4:]  # expect: GS-S005
    layer(y).sum().backward()
