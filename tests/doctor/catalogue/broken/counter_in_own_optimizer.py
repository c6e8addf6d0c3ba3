"""An optimizer counts its steps in an attribute."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


class Decaying(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.num_steps = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.num_steps += 1  # expect: GS-Y001
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"] / self.num_steps)


optimizer = Decaying(layer.parameters())


def step(x):
    optimizer.zero_grad()
    layer(x).sum().backward()
    optimizer.step()
