"""NumPy draws whether to skip a layer."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        if np.random.rand() < 0.5:  # expect: GS-R001
            return x + self.layer(x)
        return self.layer(x)


model = Model()


def step(x):
    model(x).sum().backward()
