"""The scan in chunks against the recurrence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graphstep.models.mamba import chunked_scan, recurrent_scan
from graphstep.models.mamba.scan import final_state


def drawn(batch: int, length: int, heads: int = 4, channels: int = 3, groups: int = 2, state: int = 5) -> list[Tensor]:
    tensors = [
        torch.randn(batch, length, heads, channels),
        torch.rand(batch, length, heads) * 0.3,
        -torch.rand(heads) * 4,
        torch.randn(batch, length, groups, state),
        torch.randn(batch, length, groups, state),
        torch.randn(heads),
    ]
    return [t.double().requires_grad_() for t in tensors]


@pytest.mark.parametrize(("batch", "length", "chunk"), [(2, 12, 4), (1, 8, 8), (2, 11, 4), (2, 3, 4), (1, 1, 4)])
def test_chunks_equal_the_recurrence(batch: int, length: int, chunk: int) -> None:
    inputs = drawn(batch, length)
    expected, _ = recurrent_scan(*inputs)
    upstream = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, inputs, upstream)
    y = chunked_scan(*inputs, chunk_size=chunk)
    torch.testing.assert_close(y, expected, rtol=1e-9, atol=1e-9)
    for found, wanted in zip(torch.autograd.grad(y, inputs, upstream), expected_grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("length", [1, 11])
def test_final_state_is_that_of_the_recurrence(length: int) -> None:
    x, dt, a, b, c, d = drawn(2, length)
    torch.testing.assert_close(final_state(x, dt, a, b), recurrent_scan(x, dt, a, b, c, d)[1])
