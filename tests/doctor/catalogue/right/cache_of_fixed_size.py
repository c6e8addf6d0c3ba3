"""Keys and values are written into a cache of fixed size."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("keys", torch.zeros(16, 4))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        self.keys.index_copy_(0, self.position, x[:1])
        self.position.add_(1).remainder_(16)
        return self.layer(x) @ self.keys.t()


model = Decoder().requires_grad_(False)


def step(x):
    return model(x)
