"""A forward hook collects activations."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)

seen = []


def keep(module, inputs, output):
    seen.append(output.detach())  # expect: GS-Y002


layer.register_forward_hook(keep)


def step(x):
    layer(x).sum().backward()
