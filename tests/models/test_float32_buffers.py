"""Buffers that stay in float32 when a model is converted."""

from __future__ import annotations

import torch
from torch import nn

from graphstep.models.float32_buffers import Float32Buffers


class Counting(Float32Buffers):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.tensor([1.001, 2.0, 16777215.0]), persistent=False)
        self.register_buffer("nothing", None)


def test_buffers_keep_their_type_and_value() -> None:
    module = nn.Sequential(Counting())
    module.to(torch.bfloat16)
    counting = module[0]
    assert counting.weight.dtype is torch.bfloat16
    assert torch.equal(counting.count, torch.tensor([1.001, 2.0, 16777215.0]))
    assert module.state_dict().keys() == {"0.weight"}
    assert torch.equal(module.half()[0].count, torch.tensor([1.001, 2.0, 16777215.0]))


def test_buffers_follow_to_another_device() -> None:
    counting = Counting()
    counting.to("meta", torch.bfloat16)
    assert counting.count.is_meta
    assert counting.count.dtype is torch.float32
    assert counting.to_empty(device="cpu").count.device.type == "cpu"
