"""Layers in a plain list."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.inner = [nn.Linear(4, 4), nn.Linear(4, 4)]

    def forward(self, x):
        for inner in self.inner:
            x = inner(x)  # expect: GS-W008
        return self.layer(x)


model = Model()


def step(x):
    model(x).sum().backward()
