"""A cache of keys is concatenated."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.keys = torch.zeros(8, 4)

    def forward(self, x):
        self.keys = torch.cat([self.keys, x])[-16:]  # expect: GS-Y004
        return self.layer(x) + self.keys.mean(0)


model = Model()


def step(x):
    model(x).sum().backward()
