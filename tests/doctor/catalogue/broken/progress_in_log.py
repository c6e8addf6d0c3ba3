"""Progress is logged."""

from __future__ import annotations

import logging

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


logger = logging.getLogger("catalogue")


def step(x):
    logger.critical("working on %d", x.shape[0])  # expect: GS-Y005
    layer(x).sum().backward()
