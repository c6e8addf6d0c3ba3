"""A weight is clamped in the forward."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        with torch.no_grad():
            self.layer.weight.clamp_(-1, 1)  # expect: GS-W002
        return self.layer(x)


model = Model()


def step(x):
    model(x).sum().backward()
