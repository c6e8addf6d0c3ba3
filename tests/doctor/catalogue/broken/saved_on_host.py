"""What a forward saves is kept on the host, by torch and by hooks of one's own."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

batches = [torch.randn(8, 4) for _ in range(4)]
first, second = nn.Linear(4, 4), nn.Linear(4, 4)


def pack(tensor):
    return tensor.cpu()  # expect: GS-H004


def unpack(tensor):
    return tensor


def step(x):
    with save_on_cpu():  # expect: GS-H004
        y = first(x)
    with saved_tensors_hooks(pack, unpack):
        y = second(y)
    y.sum().backward()
