"""A dict gets a key in each step."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


found = {}


def step(x):
    loss = layer(x).square().mean()
    loss.backward()
    found[len(found)] = loss.detach()  # expect: GS-Y002
