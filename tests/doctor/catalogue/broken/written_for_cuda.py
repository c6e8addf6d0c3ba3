"""A step that names the device of a GPU, waits for it and reads from it."""

from __future__ import annotations

import torch
from torch import nn

model = nn.Linear(4, 4).to("cuda")
batches = [torch.randn(8, 4).pin_memory() for _ in range(4)]


def step(x):
    x = x.cuda(non_blocking=True)  # expect: GS-T003
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    loss = model(x).square().mean()
    loss.backward()
    end.record()
    end.synchronize()  # expect: GS-H010
    torch.cuda.empty_cache()  # expect: GS-C002
    return loss.item()  # expect: GS-H001
