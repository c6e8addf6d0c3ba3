"""A layer is added in each step, another one is replaced."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))


def step(x):
    model(x).sum().backward()
    model[0] = nn.Linear(4, 4)  # expect: GS-W001
    model[1].append(nn.Tanh())  # expect: GS-Y002
