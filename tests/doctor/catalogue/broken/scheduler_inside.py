"""A scheduler steps inside."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)
optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, fused=True)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def step(x):
    optimizer.zero_grad()
    layer(x).sum().backward()
    optimizer.step()
    scheduler.step()  # expect: GS-O002
