"""Python branches on shapes and options."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


USE_BIAS = True


def step(x):
    y = layer(x) if USE_BIAS else F.linear(x, layer.weight)
    if x.shape[0] > 4 and x.dtype.is_floating_point:
        y = y / x.shape[0]
    y.sum().backward()
