"""A penalty on a gradient."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    x = x.detach().requires_grad_()
    y = layer(x).square().sum()
    (gradient,) = torch.autograd.grad(y, x, create_graph=True)
    (y + gradient.square().mean()).backward()
