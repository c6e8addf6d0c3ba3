"""The loss is put into a text."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    loss = layer(x).square().mean()
    loss.backward()
    return f"{loss:.3f}"  # expect: GS-H003
