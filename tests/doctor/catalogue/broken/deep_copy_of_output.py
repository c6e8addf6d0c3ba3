"""An output is copied deeply."""

from __future__ import annotations

import copy

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    y = layer(x)
    kept = copy.deepcopy(y.detach())  # expect: GS-H009
    y.sum().backward()
    return kept
