"""A loss over the entries that a mask names."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    mask = x > 0
    layer(x)[mask].mean().backward()  # expect: GS-S002
