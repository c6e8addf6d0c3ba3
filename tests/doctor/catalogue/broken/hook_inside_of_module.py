"""A module puts a hook on the gradient of its result, in a lambda of several lines."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]


class Limited(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.limit = 1.0

    def forward(self, x):
        y = self.layer(x)
        y.register_hook(
            lambda gradient: gradient
            / max(gradient.norm().item(), 1.0)  # expect: GS-H001
        )  # fmt: skip
        y.register_hook(self.lowered)
        return y

    def lowered(self, gradient):
        self.limit *= 0.99  # expect: GS-Y001
        return gradient.clamp(-self.limit, self.limit)


model = nn.Sequential(Limited(), nn.ReLU(), Limited())


def step(x):
    model(x).sum().backward()
