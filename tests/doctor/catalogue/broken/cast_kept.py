"""A cast of a weight is kept."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)
half = layer.weight.detach().bfloat16()


def step(x):
    y = F.linear(x.bfloat16(), half)  # expect: GS-W004
    (y.float() + layer(x)).sum().backward()
