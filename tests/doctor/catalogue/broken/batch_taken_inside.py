"""The step takes its batch."""

from __future__ import annotations

import torch
from torch import nn

layer = nn.Linear(4, 4)
stream = iter([torch.randn(8, 4) for _ in range(20)])


def step():
    layer(next(stream)).sum().backward()  # expect: GS-D004
