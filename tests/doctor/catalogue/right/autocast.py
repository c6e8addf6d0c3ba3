"""Autocast around the forward."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        loss = layer(x).float().square().mean()
    loss.backward()
