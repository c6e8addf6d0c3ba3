"""Anomaly detection is on."""

from __future__ import annotations

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    with torch.autograd.detect_anomaly():  # expect: GS-C004
        layer(x).sum().backward()
