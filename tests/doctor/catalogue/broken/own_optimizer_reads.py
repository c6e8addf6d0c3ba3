"""An optimizer of one's own reads a norm."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]


class Normed(torch.optim.Optimizer):
    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                norm = parameter.grad.norm().item()  # expect: GS-H001
                parameter.sub_(parameter.grad, alpha=group["lr"] / max(norm, 1.0))


layer = nn.Linear(4, 4)
optimizer = Normed(layer.parameters(), lr=0.1)


def step(x):
    optimizer.zero_grad()
    layer(x).sum().backward()
    optimizer.step()
