"""Tensors made by the classes that torch had before torch.tensor."""

import torch
from torch import nn

layer = nn.Linear(4, 4)
batches = [torch.randn(8, 4) for _ in range(4)]


def step(x):
    rows = torch.LongTensor([0, 1, 2])  # expect: GS-T001
    scales = torch.Tensor(4)  # expect: GS-T002
    scales.fill_(0.5)
    (layer(x)[rows] * scales).sum().backward()
