"""A step whose decorators count: without them there would be a gradient."""

import functools

import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)).eval()
batches = [torch.randn(8, 4) for _ in range(4)]


def normalized(function):
    @functools.wraps(function)
    def around(x):
        return function((x - x.mean()) / (x.std() + 1e-5))

    return around


@torch.no_grad()
@normalized
def step(x):
    y = model(x)
    assert not y.requires_grad
    return y.argmax(-1)
