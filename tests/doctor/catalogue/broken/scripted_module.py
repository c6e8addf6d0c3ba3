"""A module of torch.jit."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
model = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))


def step(x):
    model(x).sum().backward()  # expect: GS-C003
