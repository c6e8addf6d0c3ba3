"""Hooks that compute with tensors alone, registered once."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)

layer.weight.register_hook(lambda gradient: gradient / gradient.norm().clamp(min=1))
layer.register_forward_hook(lambda module, inputs, output: output * 2)


def step(x):
    layer(x).sum().backward()
