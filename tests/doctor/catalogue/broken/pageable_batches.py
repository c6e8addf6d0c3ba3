"""Batches in memory that is not pinned."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

layer = nn.Linear(4, 4)
batches = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=8, drop_last=True)  # expect: GS-D003


def step(x):
    layer(x).sum().backward()
