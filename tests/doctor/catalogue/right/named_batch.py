"""A batch of named tensors, and a flag that stays."""

from __future__ import annotations

import torch
from torch import nn

layer = nn.Linear(4, 4)
batches = [{"x": torch.randn(8, 4), "use_mean": True} for _ in range(4)]


def step(x, use_mean):
    y = layer(x)
    (y.mean() if use_mean else y.sum()).backward()
