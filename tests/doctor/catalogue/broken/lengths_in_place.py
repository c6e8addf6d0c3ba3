"""Lengths from outside are advanced in place."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


lengths = torch.zeros(8, 1)


def step(x):
    lengths.add_(1)  # expect: GS-W005
    (layer(x) * lengths).sum().backward()
