"""Weight normalization."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


def step(x):
    layer(x).square().sum().backward()
