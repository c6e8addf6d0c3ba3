"""The batch is moved to the device inside the step."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
layer = nn.Linear(4, 4).to(device)


def step(x):
    x = x.to(device, non_blocking=True)  # expect: GS-T003
    layer(x).sum().backward()
