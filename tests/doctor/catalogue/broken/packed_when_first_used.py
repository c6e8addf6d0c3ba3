"""A packed weight is made at the first call and never again."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.packed = None

    def forward(self, x):
        if self.packed is None:
            self.packed = self.layer.weight.detach().t() * 2
        return self.layer(x) + x @ self.packed  # expect: GS-W004


model = Model()


def step(x):
    model(x).sum().backward()
