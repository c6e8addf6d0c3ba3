from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tests.models.tiny import GPT2, LLAMA, gradients, logged_kernels, seeded
from torch import Tensor

from graphstep.config.model import ModelConfig
from graphstep.config.switches import CudaGraphModule
from graphstep.models import RotaryTables, TransformerLayer, initialize_weights
from graphstep.models.initialization import WeightInitializer


def built(config: ModelConfig) -> tuple[TransformerLayer, tuple[Tensor, ...]]:
    layer = TransformerLayer(config)
    initialize_weights(layer, WeightInitializer(std=0.2, num_layers=1, generator=seeded()))
    if config.position_embedding_type != "rope":
        return layer, ()
    tables = RotaryTables(config)
    initialize_weights(tables, WeightInitializer(std=0.2, num_layers=1))
    return layer, tables(config.seq_length, torch.float32)


@pytest.fixture
def hidden() -> Tensor:
    return torch.randn(2, 12, 32, requires_grad=True)


@pytest.mark.parametrize("config", [GPT2, LLAMA])
def test_segments_cover_the_layer(config: ModelConfig) -> None:
    layer, _ = built(config)
    segments = layer.segments()
    assert [(segment.kind, segment.name) for segment in segments] == [("attn", "attention"), ("mlp", "mlp")]
    assert all(segment.kind in set(CudaGraphModule) for segment in segments)
    assert all(layer.get_submodule(segment.name) in segment.modules for segment in segments)
    owned = [id(parameter) for segment in segments for m in segment.modules for parameter in m.parameters()]
    assert sorted(owned) == sorted(id(parameter) for parameter in layer.parameters())


@pytest.mark.parametrize("config", [GPT2, LLAMA])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_segments_composed_equal_the_layer_bitwise(config: ModelConfig, dropout: float, hidden: Tensor) -> None:
    layer, context = built(replace(config, hidden_dropout=dropout, attention_dropout=dropout))
    upstream = torch.randn_like(hidden)
    torch.manual_seed(3)
    whole = layer(hidden, *context)
    whole.backward(upstream)
    of_layer = gradients(layer)
    hidden_grad, hidden.grad = hidden.grad, None
    layer.zero_grad()
    torch.manual_seed(3)
    composed = hidden
    for segment in layer.segments():
        composed = segment.fn(composed, *context)
    composed.backward(upstream)
    assert torch.equal(composed, whole)
    assert torch.equal(hidden.grad, hidden_grad)
    assert all(torch.equal(grad, of_layer[name]) for name, grad in gradients(layer).items())


def test_residual_connections(hidden: Tensor) -> None:
    layer, _ = built(GPT2)
    middle = hidden + layer.attention(layer.attention_norm(hidden))
    assert torch.equal(layer(hidden), middle + layer.mlp(layer.mlp_norm(middle)))


def test_segments_follow_a_replaced_module(hidden: Tensor) -> None:
    layer, _ = built(GPT2)
    layer.mlp = torch.nn.Identity()
    assert layer.segments()[1].modules == (layer.mlp_norm, layer.mlp)
    middle = hidden + layer.attention(layer.attention_norm(hidden))
    assert torch.equal(layer(hidden), middle + layer.mlp_norm(middle))


def test_a_copy_is_independent(hidden: Tensor) -> None:
    layer, _ = built(GPT2)
    before = layer(hidden)
    duplicate = copy.deepcopy(layer)
    torch.nn.init.zeros_(duplicate.mlp.down.weight)
    assert torch.equal(layer(hidden), before)
    assert not torch.equal(duplicate(hidden), before)


def test_hidden_dropout_hits_the_update_not_the_residual(hidden: Tensor) -> None:
    layer, _ = built(replace(GPT2, hidden_dropout=0.999999))
    torch.testing.assert_close(layer(hidden), hidden)
    layer.eval()
    assert not torch.allclose(layer(hidden), hidden)


# What a kernel count may not exceed without somebody noticing. The norms are left out: on the CPU they are decomposed.
SDPA = "_scaled_dot_product_flash_attention_for_cpu"
LLAMA_FORWARD = f"mm mul addcmul_ addcmul_ {SDPA} mm add, mm silu mul mm add"
GPT2_FORWARD = f"addmm {SDPA} addmm add, addmm gelu addmm add"
LLAMA_BACKWARD = f"mm mm mul mul silu_backward mm mm add, mm mm {SDPA}_backward cat mul addcmul_ addcmul_ cat mm mm add"
GPT2_BACKWARD = f"mm mm sum gelu_backward mm mm sum add, mm mm sum {SDPA}_backward cat mm mm sum add"


@pytest.mark.parametrize(
    ("config", "forward", "backward"), [(GPT2, GPT2_FORWARD, GPT2_BACKWARD), (LLAMA, LLAMA_FORWARD, LLAMA_BACKWARD)]
)
def test_kernels_of_a_layer(config: ModelConfig, forward: str, backward: str, hidden: Tensor) -> None:
    layer, context = built(config)
    layer.attention_norm = torch.nn.Identity()
    layer.mlp_norm = torch.nn.Identity()
    upstream = torch.randn_like(hidden)
    with logged_kernels() as launched:
        y = layer(hidden, *context)
    assert launched == forward.replace(",", "").split()
    with logged_kernels() as launched:
        torch.autograd.grad(y, [hidden, *layer.mlp.parameters(), *layer.attention.parameters()], upstream)
    assert sorted(launched) == sorted(backward.replace(",", "").split())
