"""Embedding and head share a weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

embedding, head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
head.weight = embedding.weight
batches = [torch.randint(0, 16, (2, 6)) for _ in range(4)]


def step(tokens):
    F.cross_entropy(head(embedding(tokens)).flatten(0, 1), tokens.flatten()).backward()
