"""A temperature is annealed in Python."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.temperature = 1.0

    def forward(self, x):
        self.temperature *= 0.99  # expect: GS-Y001
        return self.layer(x) / self.temperature


model = Model()


def step(x):
    model(x).sum().backward()
