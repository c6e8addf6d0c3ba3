"""Activation recompute without random numbers."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

batches = [torch.randn(8, 4) for _ in range(4)]
block = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


def step(x):
    checkpoint(block, x, use_reentrant=False).sum().backward()
