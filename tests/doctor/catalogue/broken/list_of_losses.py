"""Losses are collected in a list."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


losses = []


def step(x):
    loss = layer(x).square().mean()
    loss.backward()
    losses.append(loss.detach())  # expect: GS-Y002
