"""NaN in the loss ends the run."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    loss = layer(x).square().mean()
    if torch.isnan(loss).any():  # expect: GS-H007
        raise ArithmeticError("the loss is NaN")
    loss.backward()
