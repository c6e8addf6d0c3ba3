"""Progress is printed."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    print("working", x.shape[0])  # expect: GS-Y005
    layer(x).sum().backward()
