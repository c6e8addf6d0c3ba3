"""A logger formats a tensor and would swallow the error."""

from __future__ import annotations

import logging

import torch
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
layer = nn.Linear(4, 4)


logger = logging.getLogger("catalogue")


def step(x):
    loss = layer(x).square().mean()
    logger.critical("loss %s", loss)  # expect: GS-H003
    loss.backward()
