"""A weight gets other memory."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    layer(x).sum().backward()
    layer.weight.data = layer.weight.data.clamp(-1, 1)  # expect: GS-W001
