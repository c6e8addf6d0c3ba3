"""torch's own encoder with dropout."""

from __future__ import annotations

import torch
from torch import nn

layer = nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=16, batch_first=True)
model = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
batches = [torch.randn(2, 5, 8) for _ in range(4)]


def step(x):
    model(x).square().mean().backward()
