"""masked_select."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    layer(x).masked_select(x > 0).sum().backward()  # expect: GS-S004
