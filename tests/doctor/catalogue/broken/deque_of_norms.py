"""A deque of norms."""

from __future__ import annotations

import collections

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


norms = collections.deque(maxlen=100)


def step(x):
    layer(x).sum().backward()
    norms.append(layer.weight.grad.norm())  # expect: GS-Y002
