"""DataParallel around the model."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
model = nn.DataParallel(nn.Linear(4, 4))


def step(x):
    model(x).sum().backward()  # expect: GS-C003
