"""A counter in an array of numpy."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)
count = np.zeros(1)


def step(x):
    count[0] += 1  # expect: GS-Y001
    (layer(x) / float(count[0])).sum().backward()
