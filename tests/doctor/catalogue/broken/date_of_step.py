"""The date is taken for a log."""

import datetime

import torch
from torch import nn

layer = nn.Linear(4, 4)
batches = [torch.randn(8, 4) for _ in range(4)]


def step(x):
    layer(x).sum().backward()
    return datetime.datetime.now()  # expect: GS-Y006
