"""A layer is frozen in every other step."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def step(x):
    for parameter in model[0].parameters():
        parameter.requires_grad_(not parameter.requires_grad)  # expect: GS-Y001
    model(x).sum().backward()
