"""The last batch is short."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

layer = nn.Linear(4, 4)
batches = DataLoader(TensorDataset(torch.randn(20, 4)), batch_size=8, pin_memory=True)  # expect: GS-D002


def step(x):
    layer(x).sum().backward()
