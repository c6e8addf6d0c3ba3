"""A loop as long as a tensor says."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


length = torch.tensor(3)


def step(x):
    for _ in range(length):  # expect: GS-H001
        x = layer(x)
    x.sum().backward()
