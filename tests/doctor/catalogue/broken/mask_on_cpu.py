"""A causal mask is built on the CPU."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    mask = torch.ones(8, 8).tril()  # expect: GS-T002
    (mask @ layer(x)).sum().backward()
