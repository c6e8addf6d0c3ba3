"""repeat_interleave with its output size."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)
repeats = torch.tensor([1, 2, 1, 2, 1, 2, 1, 2])


def step(x):
    layer(x).repeat_interleave(repeats, 0, output_size=12).sum().backward()
