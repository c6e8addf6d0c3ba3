"""A counter that each thread has of its own."""

from __future__ import annotations

import threading

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)
own = threading.local()
own.count = 0


def step(x):
    own.count += 1  # expect: GS-Y001
    (layer(x) / own.count).sum().backward()
