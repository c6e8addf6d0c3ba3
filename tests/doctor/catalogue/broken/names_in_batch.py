"""Texts in the batch that differ."""

from __future__ import annotations

import torch
from torch import nn

layer = nn.Linear(4, 4)
batches = [{"x": torch.randn(8, 4), "name": f"sample {index}"} for index in range(4)]


def step(batch):  # expect: GS-D001
    layer(batch["x"]).sum().backward()
