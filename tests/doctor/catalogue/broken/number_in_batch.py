"""A number in the batch that differs."""

from __future__ import annotations

import torch
from torch import nn

layer = nn.Linear(4, 4)
batches = [(torch.randn(8, 4), 0.1 * index) for index in range(4)]


def step(x, scale):  # expect: GS-D001
    (layer(x) * scale).sum().backward()
