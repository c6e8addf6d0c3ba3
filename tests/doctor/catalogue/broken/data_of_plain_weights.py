"""Weights that are no parameters, in a list, get other memory in each step."""

from __future__ import annotations

import torch

batches = [torch.randn(8, 4) for _ in range(4)]
weights = [torch.randn(4, 4, requires_grad=True) for _ in range(2)]


def step(x):
    for weight in weights:
        x = x @ weight
    x.sum().backward()
    for weight in weights:
        weight.data = weight.data - 0.1 * weight.grad  # expect: GS-W001
        weight.grad = None
