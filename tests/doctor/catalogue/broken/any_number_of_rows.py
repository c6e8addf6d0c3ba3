"""A decorator that does not say what it decorates; rows of other lengths in each batch."""

from __future__ import annotations

import torch
from torch import nn

batches = [[torch.randint(16, (size + 3,)) for size in range(first, first + 3)] for first in range(4)]
embedding = nn.Embedding(16, 4)


def scaled(function):
    def around(*args, **kwargs):  # expect: GS-D005
        return function(*args, **kwargs)

    return around


@scaled
def step(*rows):
    embedding(nn.utils.rnn.pad_sequence(rows, batch_first=True)).sum().backward()
