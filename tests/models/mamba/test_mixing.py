"""The mixing of a Mamba-2 layer: its gradient, the plain formulas, and how many kernels it takes."""

from __future__ import annotations

import pytest
import torch
from tests.models.tiny import logged_kernels
from torch import Tensor

from graphstep.models.mamba.layout import MixerLayout, MixerWeights
from graphstep.models.mamba.mixing import mix
from graphstep.models.mamba.plain import mix_plainly

LAYOUT = MixerLayout(groups=2, heads_per_group=2, channels=3, state=5)


def drawn(batch: int, length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    tensors = [
        torch.randn(batch, length, sum(LAYOUT.widths)),
        torch.randn(4, LAYOUT.convolved) * 0.5,
        torch.randn(LAYOUT.convolved) * 0.3,
        torch.randn(4) * 0.5 - 1,
        torch.randn(4) * 0.3,
        torch.randn(4),
    ]
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def mixed(chunk: int, *tensors: Tensor) -> Tensor:
    causal = torch.ones(chunk, chunk, dtype=tensors[0].dtype).tril()
    return mix(tensors[0], MixerWeights(*tensors[1:]), causal, LAYOUT)


SHAPES = pytest.mark.parametrize(("batch", "length", "chunk"), [(2, 4, 4), (1, 6, 3), (2, 8, 2), (1, 1, 1)])


@SHAPES
def test_gradients_are_those_of_the_function(batch: int, length: int, chunk: int) -> None:
    torch.autograd.gradcheck(lambda *tensors: mixed(chunk, *tensors), drawn(batch, length))


@SHAPES
def test_equals_the_plain_formulas(batch: int, length: int, chunk: int) -> None:
    tensors = drawn(batch, length)
    plain = mix_plainly(tensors[0], MixerWeights(*tensors[1:]), chunk, LAYOUT)
    torch.testing.assert_close(mixed(chunk, *tensors), plain)


def test_large_decays_neither_overflow_nor_hide_the_gradient() -> None:
    tensors = drawn(1, 8, torch.float32)
    with torch.no_grad():
        tensors[3].fill_(60.0)  # Steps of 60 times decays of about 1: differences within a chunk far above 88.
    y = mixed(8, *tensors)
    plain = mix_plainly(tensors[0], MixerWeights(*tensors[1:]), 8, LAYOUT)
    torch.testing.assert_close(y, plain)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(y.sum(), tensors))


@pytest.mark.parametrize(("chunks", "forward", "backward"), [(1, 24, 40), (2, 28, 54), (3, 31, 60), (4, 32, 61)])
def test_kernels(chunks: int, forward: int, backward: int) -> None:
    tensors = drawn(2, 4 * chunks, torch.bfloat16)
    causal = torch.ones(4, 4).tril()
    with logged_kernels() as launched:
        y = mix(tensors[0], MixerWeights(*tensors[1:]), causal, LAYOUT)
    assert len([name for name in launched if name != "promote_types"]) == forward, launched
    upstream = torch.randn_like(y)
    with logged_kernels() as launched:
        y.backward(upstream)
    assert len(launched) == backward, launched


def test_deterministic_mode_does_without_operations_that_it_refuses_on_a_gpu() -> None:
    tensors = drawn(2, 8)
    expected = mixed(4, *tensors)
    upstream = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, tensors, upstream)
    torch.use_deterministic_algorithms(True)
    try:
        with logged_kernels() as launched:
            y = mixed(4, *tensors)
            grads = torch.autograd.grad(y, tensors, upstream)
    finally:
        torch.use_deterministic_algorithms(False)
    assert "cumsum" not in launched
    torch.testing.assert_close((y, *grads), (expected, *expected_grads))
