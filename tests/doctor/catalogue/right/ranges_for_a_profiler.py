"""Ranges of NVTX and properties of the device, which only a machine with a GPU has."""

import torch
from torch import nn

model = nn.Linear(4, 4).cuda()
batches = [torch.randn(8, 4, device="cuda") for _ in range(4)]


def step(x):
    with torch.cuda.device(0):
        with torch.cuda.nvtx.range("forward"):
            loss = model(x).square().mean()
        torch.cuda.nvtx.range_push("backward")
        loss.backward()
        torch.cuda.nvtx.range_pop()
    return loss.detach()
