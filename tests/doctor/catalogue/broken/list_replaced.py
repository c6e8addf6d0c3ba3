"""A list is replaced by a longer one."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


class Samples:
    def __init__(self):
        self.kept = []

    def add(self, x):
        self.kept = [*self.kept[-100:], x]  # expect: GS-Y002


samples = Samples()


def step(x):
    samples.add(x.clone())
    (layer(x) - torch.stack(samples.kept).mean(0)).sum().backward()
