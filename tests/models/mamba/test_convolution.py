"""The causal convolution against the one of torch."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from graphstep.models.mamba.convolution import convolve, convolve_backward


@pytest.mark.parametrize("length", [1, 2, 3, 9])
def test_equals_a_library_convolution(length: int) -> None:
    x, weight, bias = (torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in ((2, length, 5), (4, 5), (5,)))
    padded = functional.pad(x.mT, (3, 0))
    expected = functional.conv1d(padded, weight.flip(0).t()[:, None], bias, groups=5).mT
    torch.testing.assert_close(convolve(x, weight, bias), expected)
    upstream = torch.randn_like(expected)
    grads = torch.autograd.grad(expected, (x, weight, bias), upstream)
    wide = torch.full((2, length, 8), torch.nan, dtype=torch.float64)  # The gradient is a part of a wider tensor.
    found = convolve_backward(
        functional.pad(upstream, (0, 0, 0, 3)), x.detach(), weight.detach(), grad_x_BSW=wide[..., 1:6]
    )
    for ours, theirs in zip((wide[..., 1:6], *found), grads, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert wide[..., [0, 6, 7]].isnan().all()
