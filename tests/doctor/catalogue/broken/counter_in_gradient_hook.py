"""A hook on a gradient counts."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)

seen = {"gradients": 0}


def count(gradient):
    seen["gradients"] += 1  # expect: GS-Y001
    return gradient / seen["gradients"]


layer.weight.register_hook(count)


def step(x):
    layer(x).sum().backward()
