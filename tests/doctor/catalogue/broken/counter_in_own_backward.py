"""A function of autograd counts its backwards, and is called by a name of its own."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


class Damped(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Damped.calls += 1  # expect: GS-Y001
        return gradient / Damped.calls


damped = Damped.apply


def step(x):
    damped(layer(x)).sum().backward()
