"""A backward hook of a module prints a gradient."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def show(module, inputs, outputs):
    print(outputs[0].norm())  # expect: GS-H003


layer.register_full_backward_hook(show)


def step(x):
    layer(x).sum().backward()
