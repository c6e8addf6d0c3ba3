"""The host waits for every collective."""

from __future__ import annotations

import os

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # expect: GS-E002
layer = nn.Linear(4, 4)


def step(x):
    layer(x).sum().backward()
