"""A transposed weight that is made at its first use; the backward reads it, too."""

from functools import cached_property

import torch
from torch import nn


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.layer = nn.Linear(4, 4)

    @cached_property
    def decoder(self):
        return self.embedding.weight.detach().t().contiguous()

    def forward(self, ids):
        return self.layer(self.embedding(ids)) @ self.decoder  # expect: GS-W004


model = Tied()
batches = [torch.randint(0, 10, (2, 3)) for _ in range(4)]


def step(ids):
    model(ids).square().mean().backward()
