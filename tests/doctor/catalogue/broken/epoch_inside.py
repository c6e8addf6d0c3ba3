"""The function that is named runs a whole epoch: it reads the loader."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.tensor([float(index), 1.0, 2.0, 3.0])


layer = nn.Linear(4, 4)
loader = DataLoader(Rows(), batch_size=8, shuffle=True)


def step():
    for x in loader:  # expect: GS-D004
        layer(x).sum().backward()
