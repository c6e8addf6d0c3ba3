"""The host waits, in a branch that only a GPU takes."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    y = layer(x)
    if x.is_cuda:
        torch.cuda.synchronize()  # expect: GS-H010
    y.sum().backward()
