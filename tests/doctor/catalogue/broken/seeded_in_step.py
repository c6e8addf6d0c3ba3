"""The step seeds torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    torch.manual_seed(1)  # expect: GS-R003
    F.dropout(layer(x), 0.5).sum().backward()
