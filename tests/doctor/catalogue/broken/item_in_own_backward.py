"""A function of autograd reads a value in its backward."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * gradient.abs().max().item()  # expect: GS-H001


layer = nn.Linear(4, 4)


def step(x):
    Scaled.apply(layer(x)).sum().backward()
