"""NaN in a gradient skips the step."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    layer(x).sum().backward()
    for parameter in layer.parameters():
        if not torch.isfinite(parameter.grad).all():  # expect: GS-H007
            return
