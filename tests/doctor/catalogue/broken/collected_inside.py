"""Garbage is collected in the step."""

from __future__ import annotations

import gc

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    layer(x).sum().backward()
    gc.collect()  # expect: GS-C002
