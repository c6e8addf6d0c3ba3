"""The loss becomes a number of Python."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    loss = layer(x).square().mean()
    loss.backward()
    return float(loss)  # expect: GS-H001
