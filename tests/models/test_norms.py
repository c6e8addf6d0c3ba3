from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.models.tiny import TINY
from torch import Tensor

from graphstep.models import LayerNorm, RMSNorm, build_norm


def rms_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / ((x * x).mean(-1, keepdim=True) + eps).sqrt() * weight


def layer_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / ((centred * centred).mean(-1, keepdim=True) + eps).sqrt() * weight + bias


@pytest.mark.parametrize("eps", [1e-5, 0.5])
def test_rms_norm_against_float64(eps: float) -> None:
    norm = RMSNorm(24, eps=eps)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(3, 5, 24, requires_grad=True)
    x64 = x.detach().double().requires_grad_()
    weight64 = norm.weight.detach().double().requires_grad_()
    y, y64 = norm(x), rms_reference(x64, weight64, eps)
    torch.testing.assert_close(y.double(), y64, rtol=1e-5, atol=1e-6)
    upstream = torch.randn_like(y)
    y.backward(upstream)
    y64.backward(upstream.double())
    torch.testing.assert_close(x.grad.double(), x64.grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm.weight.grad.double(), weight64.grad, rtol=1e-4, atol=1e-5)


def test_layer_norm_against_float64() -> None:
    norm = LayerNorm(24, eps=1e-3)
    torch.nn.init.normal_(norm.weight)
    torch.nn.init.normal_(norm.bias)
    x = torch.randn(3, 5, 24)
    expected = layer_reference(x.double(), norm.weight.double(), norm.bias.double(), 1e-3)
    torch.testing.assert_close(norm(x).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
def test_statistics_of_bfloat16_are_float32(kind: type[RMSNorm] | type[LayerNorm]) -> None:
    norm = kind(256, dtype=torch.bfloat16)
    norm.init_weights(initializer=None)  # type: ignore[arg-type]
    x = (1 + torch.randn(4, 256) / 8).bfloat16()
    weight, bias = torch.ones(256).double(), torch.zeros(256).double()
    expected = (
        rms_reference(x.double(), weight, norm.eps)
        if kind is RMSNorm
        else layer_reference(x.double(), weight, bias, norm.eps)
    )
    y = norm(x)
    assert y.dtype == torch.bfloat16
    # One rounding to 8 bits of mantissa, and no more: statistics in bfloat16 would be wrong by several of them.
    torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=2**-9)


def test_build_norm_follows_the_configuration() -> None:
    assert isinstance(build_norm(replace(TINY, normalization="RMSNorm")), RMSNorm)
    norm = build_norm(replace(TINY, normalization="LayerNorm", norm_epsilon=0.25), dtype=torch.float64)
    assert isinstance(norm, LayerNorm)
    assert (norm.eps, norm.weight.shape, norm.weight.dtype) == (0.25, (TINY.hidden_size,), torch.float64)
