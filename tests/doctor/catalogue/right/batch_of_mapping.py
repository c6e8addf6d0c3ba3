"""Batches are mappings of a class of their own, as tokenizers return them; the target is a module."""

from __future__ import annotations

import collections

import torch
from torch import nn


class Encoding(collections.UserDict):
    pass


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(8, 4)

    def forward(self, ids, mask):
        return (self.embedding(ids) * mask[..., None]).sum()


batches = [Encoding(ids=torch.randint(8, (2, 3)), mask=torch.ones(2, 3)) for _ in range(4)]
step = Model()
