"""An object that is no module counts."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]


class Statistics:
    def __init__(self):
        self.num_batches = 0


layer = nn.Linear(4, 4)
statistics = Statistics()


def step(x):
    statistics.num_batches += 1  # expect: GS-Y001
    (layer(x) / statistics.num_batches).sum().backward()
