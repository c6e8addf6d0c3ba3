"""An auxiliary loss is left in an attribute."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.penalty = None

    def forward(self, x):
        y = self.layer(x)
        self.penalty = y.square().mean()  # expect: GS-Y003
        return y


model = Model()


def step(x):
    (model(x).sum() + model.penalty).backward()
