"""A function of autograd looks for positions in its backward."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]


class Sparse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        rows = gradient[:, 0].nonzero()  # expect: GS-S001
        return gradient + rows.shape[0]


layer = nn.Linear(4, 4)


def step(x):
    Sparse.apply(layer(x)).square().sum().backward()
