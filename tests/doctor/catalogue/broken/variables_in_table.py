"""Variables of the environment, set from a table."""

import os

import torch
from torch import nn

os.environ.update({"CUDA_LAUNCH_BLOCKING": "1"})  # expect: GS-E002

layer = nn.Linear(4, 4)
batches = [torch.randn(8, 4) for _ in range(4)]


def step(x):
    layer(x).sum().backward()
