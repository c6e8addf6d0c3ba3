"""Embedding, head and cross entropy with ignored labels."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

embedding, head = nn.Embedding(16, 8), nn.Linear(8, 16)
batches = [(torch.randint(0, 16, (2, 6)), torch.randint(0, 16, (2, 6))) for _ in range(4)]


def step(tokens, labels):
    labels = labels.masked_fill(labels == 3, -100)
    F.cross_entropy(head(embedding(tokens)).flatten(0, 1), labels.flatten(), label_smoothing=0.1).backward()
