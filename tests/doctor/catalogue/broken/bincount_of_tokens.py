"""bincount, with a minimum length too."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    load = torch.bincount(x.argmax(-1), minlength=4)  # expect: GS-S004
    layer(x).sum().backward()
    return load
