"""Two backwards through one forward."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    y = layer(x)
    y.mean().backward(retain_graph=True)  # expect: GS-W010
    y.square().mean().backward()
