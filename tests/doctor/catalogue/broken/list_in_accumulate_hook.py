"""A hook after the accumulation of a gradient hands it to the host."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def watch(parameter):
    parameter.grad.sum(0).tolist()  # expect: GS-H005


layer.weight.register_post_accumulate_grad_hook(watch)


def step(x):
    layer(x).sum().backward()
