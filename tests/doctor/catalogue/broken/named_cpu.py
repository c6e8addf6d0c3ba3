"""The loss is moved to the CPU by name."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    loss = layer(x).square().mean()
    loss.backward()
    return loss.detach().to("cpu")  # expect: GS-T005
