"""A step that names the device of a GPU, with an optimizer that can be captured and a stream that is joined."""

from __future__ import annotations

import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
batches = [torch.randn(8, 4, device="cuda") for _ in range(4)]
side = torch.cuda.Stream()


def step(x):
    optimizer.zero_grad()
    y = model(x) + torch.ones(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        doubled = y * 2
    torch.cuda.current_stream().wait_stream(side)
    (y + doubled).sum().backward()
    optimizer.step()
