"""A named generator of torch."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


generator = torch.Generator()


def step(x):
    noise = torch.rand(8, 4, generator=generator, device=x.device)  # expect: GS-R002
    layer(x + noise).sum().backward()
