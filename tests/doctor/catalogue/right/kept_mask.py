"""A mask that is built once and kept."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.mask = None

    def forward(self, x):
        if self.mask is None:
            self.mask = x.new_ones(8, 8).tril()
        return self.mask @ self.layer(x)


model = Model()


def step(x):
    model(x).sum().backward()
