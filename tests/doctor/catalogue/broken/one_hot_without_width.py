"""one_hot looks for the largest label."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    wide = F.one_hot(x.argmax(-1)).float()  # expect: GS-H011
    layer(x).sum().backward()
    return wide.sum()
