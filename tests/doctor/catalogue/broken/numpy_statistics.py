"""Statistics by NumPy."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    spread = float(np.std(x.numpy()))  # expect: GS-H004
    (layer(x) / spread).sum().backward()
