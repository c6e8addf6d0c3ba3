"""A hook on a gradient draws on the host."""

from __future__ import annotations

import random

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def jitter(gradient):
    return gradient * random.uniform(0.9, 1.1)  # expect: GS-R001


layer.weight.register_hook(jitter)


def step(x):
    layer(x).sum().backward()
