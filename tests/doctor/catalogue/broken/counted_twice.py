"""A buffer is written by the recompute as well."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

batches = [torch.randn(8, 4) for _ in range(4)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("tokens", torch.zeros(()))

    def forward(self, x):
        self.tokens.add_(x.shape[0])  # expect: GS-W006
        return self.layer(x)


model = Model()


def step(x):
    checkpoint(model, x, use_reentrant=False).sum().backward()
