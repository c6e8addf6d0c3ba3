"""Expandable segments, and collectives in the graph."""

from __future__ import annotations

import os

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # expect: GS-E001
layer = nn.Linear(4, 4)


def step(x):
    layer(x).sum().backward()
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(layer.weight.grad)
