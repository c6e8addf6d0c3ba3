"""A number of Python's random scales the output."""

from __future__ import annotations

import random

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    scale = random.random()  # expect: GS-R001
    (layer(x) * scale).sum().backward()
