"""A table is transposed in place."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


table = torch.randn(4, 4)


def step(x):
    layer(x @ table.t_()).sum().backward()  # expect: GS-S007
