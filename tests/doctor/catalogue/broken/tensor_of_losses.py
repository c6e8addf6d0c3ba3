"""A list of losses becomes a tensor, value by value."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    losses = [layer(part).square().mean() for part in x.chunk(2)]
    sum(losses).backward()
    return torch.tensor([loss.detach() for loss in losses])  # expect: GS-H006
