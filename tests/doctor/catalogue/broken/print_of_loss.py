"""The loss is printed."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    loss = layer(x).square().mean()
    print("loss", loss)  # expect: GS-H003
    loss.backward()
