from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.models.tiny import TINY, logged_kernels, seeded
from torch import Tensor

from graphstep.models import MLP, initialize_weights, swiglu
from graphstep.models.initialization import WeightInitializer


def built(**changes: object) -> MLP:
    mlp = MLP(replace(TINY, **changes))
    initialize_weights(mlp, WeightInitializer(std=0.5, num_layers=1, generator=seeded()))
    return mlp


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def test_swiglu_formula() -> None:
    x = torch.randn(2, 5, 12)
    expected = silu(x[..., :6].double()) * x[..., 6:].double()
    torch.testing.assert_close(swiglu(x).double(), expected, rtol=1e-5, atol=1e-6)


def test_swiglu_gradient() -> None:
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(swiglu, (x,))


def test_swiglu_equals_the_plain_formula_bitwise() -> None:
    x = torch.randn(2, 5, 64, requires_grad=True)
    plain = torch.nn.functional.silu(x[..., :32]) * x[..., 32:]
    y = swiglu(x)
    assert torch.equal(y, plain)
    upstream = torch.randn_like(y)
    assert torch.equal(*(torch.autograd.grad(result, x, upstream)[0] for result in (y, plain)))


def test_swiglu_launches_two_kernels_and_three() -> None:
    x = torch.randn(2, 5, 64, requires_grad=True)
    upstream = torch.randn(2, 5, 32)
    with logged_kernels() as forward:
        y = swiglu(x)
    with logged_kernels() as backward:
        y.backward(upstream)
    assert forward == ["silu", "mul"]
    assert backward == ["mul", "mul", "silu_backward"]


def test_gated_mlp() -> None:
    mlp = built(swiglu=True, add_bias_linear=False)
    assert mlp.up.weight.shape == (96, 32)
    x = torch.randn(2, 5, 32)
    gate, value = mlp.up.weight.double().split(48)
    expected = (silu(x.double() @ gate.T) * (x.double() @ value.T)) @ mlp.down.weight.double().T
    torch.testing.assert_close(mlp(x).double(), expected, rtol=1e-4, atol=1e-4)


def test_gelu_mlp_is_exact_gelu() -> None:
    mlp = built()
    torch.nn.init.normal_(mlp.up.bias)
    torch.nn.init.normal_(mlp.down.bias)
    x = torch.randn(2, 5, 32)
    inner = x.double() @ mlp.up.weight.double().T + mlp.up.bias.double()
    inner = inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))
    expected = inner @ mlp.down.weight.double().T + mlp.down.bias.double()
    torch.testing.assert_close(mlp(x).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [True, False])
def test_biases(bias: bool) -> None:
    mlp = built(add_bias_linear=bias)
    assert (mlp.up.bias is not None, mlp.down.bias is not None) == (bias, bias)
