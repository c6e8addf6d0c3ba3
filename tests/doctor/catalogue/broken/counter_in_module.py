"""A module counts its calls."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x):
        self.calls += 1  # expect: GS-Y001
        return self.layer(x) / self.calls


model = Model()


def step(x):
    model(x).sum().backward()
