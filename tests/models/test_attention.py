from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.models.tiny import TINY, logged_kernels, seeded
from torch import Tensor

from graphstep.models import Attention, apply_rotary, causal_attention, initialize_weights
from graphstep.models.initialization import WeightInitializer


def attention_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Loops over heads and rows, in float64; query head n reads group n * G // N."""
    q, k, v = q.double(), k.double(), v.double()
    num_heads, num_groups = q.shape[2], k.shape[2]
    rows = []
    for head in range(num_heads):
        group = head * num_groups // num_heads
        of_head = []
        for row in range(q.shape[1]):
            scores = (q[:, row, head, None, :] * k[:, : row + 1, group]).sum(-1) / math.sqrt(q.shape[3])
            of_head.append((scores.softmax(-1)[..., None] * v[:, : row + 1, group]).sum(1))
        rows.append(torch.stack(of_head, dim=1))
    return torch.stack(rows, dim=2)


@pytest.mark.parametrize("num_groups", [1, 2, 6])
def test_causal_attention_against_loops(num_groups: int) -> None:
    q, k, v = (torch.randn(2, 7, heads, 8, requires_grad=True) for heads in (6, num_groups, num_groups))
    y = causal_attention(q, k, v)
    expected = attention_reference(q, k, v)
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-6)
    upstream = torch.randn_like(y)
    grads = torch.autograd.grad(y, (q, k, v), upstream)
    expected_grads = torch.autograd.grad(expected, (q, k, v), upstream.double())
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, rtol=1e-4, atol=1e-5)


def test_groups_equal_repeated_heads() -> None:
    q, k, v = torch.randn(2, 7, 6, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8)
    repeated = causal_attention(q, k.repeat_interleave(3, dim=2), v.repeat_interleave(3, dim=2))
    assert torch.equal(causal_attention(q, k, v), repeated)


@pytest.mark.parametrize("num_groups", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_on_the_cpu_is_one_fused_kernel(num_groups: int, dtype: torch.dtype) -> None:
    packed = torch.randn(2, 7, 4 + 2 * num_groups, 8, dtype=dtype)
    q, k, v = packed.split((4, num_groups, num_groups), dim=2)
    with logged_kernels() as kernels:
        y = causal_attention(q, k, v)
        y.flatten(2)
    assert kernels == ["_scaled_dot_product_flash_attention_for_cpu"]


def built(num_groups: int = 2, **changes: object) -> Attention:
    attention = Attention(replace(TINY, num_query_groups=num_groups, **changes))
    initialize_weights(attention, WeightInitializer(std=0.3, num_layers=1, generator=seeded()))
    return attention


def test_rows_of_the_fused_weight_are_queries_keys_values() -> None:
    attention = built()
    x = torch.randn(2, 5, 32)
    weights = attention.qkv.weight.split((32, 16, 16))
    q, k, v = ((x @ weight.T).view(2, 5, -1, 8) for weight in weights)
    expected = attention_reference(q, k, v).flatten(2) @ attention.out.weight.double().T
    torch.testing.assert_close(attention(x).double(), expected, rtol=1e-4, atol=1e-5)


def test_rotary_attention_sees_distances_only() -> None:
    attention = built(position_embedding_type="rope")
    positions = torch.arange(16.0)
    angles = torch.outer(positions, torch.tensor([1.0, 0.1, 0.01, 0.001])).repeat(1, 2)
    x = torch.randn(1, 6, 32)
    near = attention(x, angles[:6].cos(), angles[:6].sin())
    far = attention(x, angles[9:15].cos(), angles[9:15].sin())
    torch.testing.assert_close(near, far, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(near, built()(x), atol=1e-3)


@pytest.mark.parametrize(
    ("linear_bias", "qkv_bias", "expected"),
    [(True, False, (True, True)), (False, True, (True, False)), (False, False, (False, False))],
)
def test_biases(linear_bias: bool, qkv_bias: bool, expected: tuple[bool, bool]) -> None:
    attention = built(add_bias_linear=linear_bias, add_qkv_bias=qkv_bias)
    assert (attention.qkv.bias is not None, attention.out.bias is not None) == expected


def test_dropout_acts_in_training_only() -> None:
    attention = built(attention_dropout=0.5)
    x = torch.randn(2, 5, 32)
    assert not torch.equal(attention(x), attention(x))
    attention.eval()
    assert torch.equal(attention(x), built()(x))


def normalised(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


@pytest.mark.parametrize("embedding", ["none", "rope"])
def test_queries_and_keys_are_normalised_before_they_rotate(embedding: str) -> None:
    attention = built(qk_layernorm=True, normalization="RMSNorm", position_embedding_type=embedding)
    assert attention.query_norm is not None
    assert attention.key_norm is not None
    for norm in (attention.query_norm, attention.key_norm):
        assert norm.weight.shape == (8,)
        norm.weight.data.uniform_(0.5, 2.0)
    x = torch.randn(2, 5, 32)
    angles = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.1, 0.01, 0.001])).repeat(1, 2)
    rotary = (angles.cos(), angles.sin()) if embedding == "rope" else ()
    q, k, v = ((x @ weight.T).view(2, 5, -1, 8) for weight in attention.qkv.weight.split((32, 16, 16)))
    q, k = normalised(q, attention.query_norm.weight), normalised(k, attention.key_norm.weight)
    if rotary:
        q, k = apply_rotary(q, *rotary, channels=8), apply_rotary(k, *rotary, channels=8)
    expected = attention_reference(q, k, v).flatten(2) @ attention.out.weight.double().T
    torch.testing.assert_close(attention(x, *rotary).double(), expected, rtol=1e-4, atol=1e-5)


def test_weights_of_both_normalisations_are_trained() -> None:
    attention = built(qk_layernorm=True)
    attention(torch.randn(2, 5, 32)).square().sum().backward()
    grads = {name: parameter.grad for name, parameter in attention.named_parameters()}
    assert {"query_norm.weight", "query_norm.bias", "key_norm.weight"} <= set(grads)
    # A bias of all keys adds the same to every score of a query, and softmax does not see it.
    moved = [name for name, grad in grads.items() if grad is not None and grad.abs().max() > 1e-5]
    assert {"query_norm.weight", "query_norm.bias", "key_norm.weight"} <= set(moved)
