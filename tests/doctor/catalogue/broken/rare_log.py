"""A value is read every hundredth step, which the runs do not reach."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    loss = layer(x).square().mean()
    loss.backward()
    if torch.is_inference_mode_enabled():
        return loss.item()  # expect: GS-H001
    return 0.0
