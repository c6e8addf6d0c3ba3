"""A hook on a gradient branches on its norm."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def clip(gradient):
    if gradient.norm() > 1:  # expect: GS-H002
        return gradient / gradient.norm()
    return gradient


layer.weight.register_hook(clip)


def step(x):
    layer(x).sum().backward()
