"""The step normalizes its batch in place."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    x.sub_(x.mean())  # expect: GS-W007
    layer(x).sum().backward()
