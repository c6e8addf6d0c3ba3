"""The cache is emptied, on a GPU only."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    layer(x).sum().backward()
    if x.is_cuda:
        torch.cuda.empty_cache()  # expect: GS-C002
