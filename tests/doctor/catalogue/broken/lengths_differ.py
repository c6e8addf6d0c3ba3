"""Batches of different lengths."""

from __future__ import annotations

import torch
from torch import nn

layer = nn.Linear(4, 4)
batches = [torch.randn(length, 4) for length in (8, 7, 6, 8)]


def step(x):  # expect: GS-D005
    layer(x).sum().backward()
