"""A decorator around the step, which is a part of it: the time is taken in the decorator."""

import functools
import time

import torch
from torch import nn

layer = nn.Linear(4, 4)
batches = [torch.randn(8, 4) for _ in range(4)]
seconds = {"last": 0.0}


def timed(function):
    @functools.wraps(function)
    def around(*args, **kwargs):
        begin = time.perf_counter()  # expect: GS-Y006
        result = function(*args, **kwargs)
        seconds["last"] = time.perf_counter() - begin  # expect: GS-Y006 # expect: GS-Y001
        return result

    return around


@timed
def step(x):
    layer(x).sum().backward()
