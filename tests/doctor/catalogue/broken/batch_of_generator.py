"""The step takes its batch from a generator."""

from __future__ import annotations

import itertools

import torch
from torch import nn

layer = nn.Linear(4, 4)


def endless():
    for index in itertools.count():
        yield torch.full((8, 4), float(index), device=layer.weight.device)


stream = endless()


def step():
    x = next(stream)  # expect: GS-D004
    layer(x).sum().backward()
