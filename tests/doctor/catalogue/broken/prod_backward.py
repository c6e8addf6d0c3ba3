"""The forward of prod can be captured and its backward cannot."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    y = layer(x)
    y.prod().backward()  # expect: GS-H012
