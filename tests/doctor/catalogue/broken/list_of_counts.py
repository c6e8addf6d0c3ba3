"""Tokens are split among experts by counts on the host."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

batches = [torch.randn(8, 4) for _ in range(4)]
experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])


def step(x):
    chosen = x.argmax(-1)
    order = chosen.argsort()
    counts = F.one_hot(chosen, 4).sum(0).tolist()  # expect: GS-H005
    parts = x[order].split(counts)
    torch.cat([expert(part) for expert, part in zip(experts, parts, strict=True)]).sum().backward()
