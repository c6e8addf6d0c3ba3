"""A function of autograd keeps what its forward was given."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)
shapes = []


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(x):
        shapes.append(x.shape)  # expect: GS-Y002
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def step(x):
    Noted.apply(layer(x)).sum().backward()
