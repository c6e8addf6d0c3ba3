"""A state that is a tuple of tensors, as that of an LSTM, and a number in another one."""

import torch
from torch import nn


class Trainer:
    def __init__(self):
        self.model = nn.LSTM(4, 4, batch_first=True)
        self.state = (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))
        self.position = (0, "left")

    def step(self, x):
        y, state = self.model(x, self.state)
        y.sum().backward()
        self.state = tuple(part.detach() for part in state)  # expect: GS-Y004
        self.position = (self.position[0] + 1, "left")  # expect: GS-Y001


trainer = Trainer()
batches = [torch.randn(2, 3, 4) for _ in range(4)]
step = trainer.step
