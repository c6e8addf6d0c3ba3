"""Memory is not cached."""

from __future__ import annotations

import os

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # expect: GS-E003
layer = nn.Linear(4, 4)


def step(x):
    layer(x).sum().backward()
