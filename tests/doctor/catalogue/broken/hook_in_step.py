"""A hook is registered in each step."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    handle = layer.register_forward_hook(lambda module, inputs, output: output * 2)  # expect: GS-Y007
    layer(x).sum().backward()
    handle.remove()
