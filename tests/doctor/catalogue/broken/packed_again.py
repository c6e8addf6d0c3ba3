"""Copies of a weight that the step writes anew: they are not stale. One of them is no buffer."""

import torch
from torch import nn


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("target", self.layer.weight.detach().clone())
        self.packed = self.layer.weight.detach().t().contiguous()

    def forward(self, x):
        return self.layer(x) - nn.functional.linear(x, self.target) + x @ self.packed

    @torch.no_grad()
    def follow(self):
        self.target.lerp_(self.layer.weight, 0.1)
        self.packed.copy_(self.layer.weight.t())  # expect: GS-W005


model = Critic()
batches = [torch.randn(8, 4) for _ in range(4)]


def step(x):
    model(x).square().mean().backward()
    model.follow()
