"""A hook on a gradient is registered in each step."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    handle = layer.weight.register_hook(lambda gradient: gradient * 2)  # expect: GS-Y007
    layer(x).sum().backward()
    handle.remove()
