from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.models.tiny import LLAMA, logged_kernels
from torch import Tensor

from graphstep.config.model import ModelConfig
from graphstep.models import RotaryTables, apply_rotary, initialize_weights, rotary_channels
from graphstep.models.initialization import WeightInitializer


def tables(config: ModelConfig) -> RotaryTables:
    built = RotaryTables(config)
    initialize_weights(built, WeightInitializer(std=0.02, num_layers=1))
    return built


def rotated_as_complex_numbers(x: Tensor, channels: int, base: float) -> Tensor:
    """z' = z e^(i p theta) with z = x[j] + i x[j + channels / 2], in float64."""
    half = channels // 2
    x = x.double()
    theta = base ** (-2.0 * torch.arange(half, dtype=torch.float64) / channels)
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * theta
    z = torch.complex(x[..., :half], x[..., half:channels])
    turned = z * torch.polar(torch.ones_like(angle), angle)[:, None, :]
    return torch.cat((turned.real, turned.imag, x[..., channels:]), dim=-1)


@pytest.mark.parametrize("percent", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("base", [10000.0, 50.0])
def test_rotation_is_multiplication_of_complex_numbers(percent: float, base: float) -> None:
    config = replace(LLAMA, rotary_percent=percent, rotary_base=base)
    channels = rotary_channels(config)
    assert channels == int(8 * percent)
    x = torch.randn(2, 12, 3, 8)
    y = apply_rotary(x, *tables(config)(12, torch.float32), channels=channels)
    torch.testing.assert_close(y.double(), rotated_as_complex_numbers(x, channels, base), rtol=1e-5, atol=1e-6)
    assert torch.equal(y[..., channels:], x[..., channels:])


@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_gradient_of_the_rotation(percent: float) -> None:
    config = replace(LLAMA, rotary_percent=percent)
    channels = rotary_channels(config)
    context = tables(config)(5, torch.float64)
    x = torch.randn(2, 5, 3, 8, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: apply_rotary(x, *context, channels=channels), (x,))
    torch.autograd.gradgradcheck(lambda x: apply_rotary(x, *context, channels=channels), (x,))


def test_scores_depend_on_the_distance_only() -> None:
    context = tables(LLAMA)(16, torch.float32)
    q, k = torch.randn(8).expand(1, 16, 1, 8), torch.randn(8).expand(1, 16, 1, 8)
    scores = apply_rotary(q, *context, channels=8)[0, :, 0] @ apply_rotary(k, *context, channels=8)[0, :, 0].T
    for offset in (-3, 0, 5):
        diagonal = scores.diagonal(offset)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)


def test_a_strided_input_is_rotated_without_a_copy() -> None:
    context = tables(LLAMA)(12, torch.float32)
    packed = torch.randn(2, 12, 6, 8)
    with logged_kernels() as kernels:
        y = apply_rotary(packed[:, :, :4], *context, channels=8)
    assert kernels == ["mul", "addcmul_", "addcmul_"]
    assert torch.equal(y, apply_rotary(packed[:, :, :4].clone(), *context, channels=8))


def test_tables_are_float32_and_outside_the_state_dict() -> None:
    rotary = tables(LLAMA)
    assert rotary.state_dict() == {}
    assert rotary.table.shape == (2, 16, 8)
    assert rotary.table.dtype == torch.float32
    cos, sin = rotary(12, torch.bfloat16)
    assert cos.shape == sin.shape == (12, 8)
    assert torch.equal(cos, rotary.table[0, :12].bfloat16())
    assert torch.equal(sin, rotary.table[1, :12].bfloat16())
    assert torch.equal(cos[0], torch.ones_like(cos[0]))


def test_tables_are_cast_to_the_dtype_of_the_activations() -> None:
    x = torch.randn(1, 12, 2, 8)
    rotary = tables(LLAMA)
    y = apply_rotary(x.bfloat16(), *rotary(12, torch.float32), channels=8)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, apply_rotary(x.bfloat16(), *rotary(12, torch.bfloat16), channels=8))


def test_taking_the_tables_costs_no_kernel_in_float32_and_one_otherwise() -> None:
    rotary = tables(LLAMA)
    with logged_kernels() as kernels:
        rotary(12, torch.float32)
    assert kernels == []
    with logged_kernels() as kernels:
        rotary(12, torch.bfloat16)
    assert kernels == ["_to_copy"]


def test_no_channels_rotate_without_rotary_embedding() -> None:
    assert rotary_channels(replace(LLAMA, position_embedding_type="none")) == 0
