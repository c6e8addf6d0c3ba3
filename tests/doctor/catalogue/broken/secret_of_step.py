"""Numbers that no generator has drawn."""

from __future__ import annotations

import secrets
import uuid

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


def step(x):
    scale = secrets.choice([0.5, 2.0])  # expect: GS-R001
    shift = uuid.uuid4().int % 7  # expect: GS-R001
    (layer(x) * scale + shift).sum().backward()
