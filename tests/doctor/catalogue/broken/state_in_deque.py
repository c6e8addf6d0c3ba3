"""The last activation is kept in a deque of one entry."""

from __future__ import annotations

import collections

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)
window = collections.deque([torch.zeros(8, 4)], maxlen=1)


def step(x):
    y = layer(x) + window[-1]
    window.append(y.detach())  # expect: GS-Y004
    y.sum().backward()
