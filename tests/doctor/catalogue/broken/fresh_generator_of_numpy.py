"""A generator of NumPy is made in each step."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    scale = np.random.default_rng().uniform(0.5, 1.5)  # expect: GS-R001
    (layer(x) * scale).sum().backward()
