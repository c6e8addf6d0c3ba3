"""A flag flips from call to call."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.is_odd = False

    def forward(self, x):
        self.is_odd = not self.is_odd  # expect: GS-Y001
        return self.layer(x) if self.is_odd else self.layer(-x)


model = Model()


def step(x):
    model(x).sum().backward()
