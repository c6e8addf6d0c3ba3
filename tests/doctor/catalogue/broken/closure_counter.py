"""A variable of a closure counts."""

from __future__ import annotations

import torch
from torch import nn


def build():
    layer = nn.Linear(4, 4)
    count = 0

    def step(x):
        nonlocal count
        count += 1  # expect: GS-Y001
        (layer(x) / count).sum().backward()

    return step, [torch.randn(8, 4) for _ in range(4)]


step = build
