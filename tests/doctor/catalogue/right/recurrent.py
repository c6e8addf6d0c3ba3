"""A recurrent network."""

from __future__ import annotations

import torch
from torch import nn

model = nn.GRU(4, 6, batch_first=True)
batches = [torch.randn(2, 5, 4) for _ in range(4)]


def step(x):
    output, _ = model(x)
    output.square().mean().backward()
