"""A module keeps its outputs."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.outputs = []

    def forward(self, x):
        y = self.layer(x)
        self.outputs.append(y.detach())  # expect: GS-Y002
        return y


model = Model()


def step(x):
    model(x).sum().backward()
