"""Scratch memory grows when it is needed."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


scratch = torch.empty(0)


def step(x):
    scratch.resize_(32)  # expect: GS-S006
    layer(x).sum().backward()
