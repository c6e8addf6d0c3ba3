"""A parameter is replaced by a new one."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    layer(x).sum().backward()
    layer.bias = nn.Parameter(layer.bias.detach() * 0.9)  # expect: GS-W001
