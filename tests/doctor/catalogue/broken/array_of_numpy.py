"""An array of NumPy becomes a tensor in the step."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


weights = np.ones((8, 4), dtype=np.float32)


def step(x):
    scale = torch.from_numpy(weights)  # expect: GS-T001
    layer(x * scale).sum().backward()
