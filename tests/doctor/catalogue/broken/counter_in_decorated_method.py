"""Methods under decorators, torch's and an own one, and a number that is an attribute of a function."""

import functools

import torch
from torch import nn


def named(function):
    @functools.wraps(function)
    def around(self, *args):
        with torch.profiler.record_function(function.__name__):
            return function(self, *args)

    return around


class Updater:
    def __init__(self, parameters):
        self.num_seen, self.num_steps = 0, 0
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.apply)

    @torch.no_grad()
    def apply(self, parameter):
        parameter.add_(parameter.grad, alpha=-0.1)
        parameter.grad = None
        self.num_seen += 1  # expect: GS-Y001

    @named
    def count(self):
        self.num_steps += 1  # expect: GS-Y001


layer = nn.Linear(4, 4)
updater = Updater(layer.parameters())
batches = [torch.randn(8, 4) for _ in range(4)]


def step(x):
    layer(x).sum().backward()
    updater.count()
    step.num_calls += 1  # expect: GS-Y001


step.num_calls = 0
