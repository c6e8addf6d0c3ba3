"""A phase that alternates."""

from __future__ import annotations

import enum

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


class Phase(enum.Enum):
    WARM = 1.0
    COLD = 0.5


phase = Phase.WARM


def step(x):
    global phase  # noqa: PLW0603
    phase = Phase.COLD if phase is Phase.WARM else Phase.WARM  # expect: GS-Y001
    (layer(x) * phase.value).sum().backward()
