from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.models.tiny import GPT2, LLAMA, TINY, seeded, tiny_batch, tiny_model
from torch import nn

from graphstep.config.model import ModelConfig
from graphstep.models import GPTModel, TransformerLayer, initialize_weights
from graphstep.models.initialization import WeightInitializer

WIDE = replace(TINY, num_layers=8, hidden_size=64, kv_channels=16, ffn_hidden_size=256, vocab_size=512)


@pytest.mark.parametrize("config", [WIDE, replace(WIDE, swiglu=True, untie_embeddings_and_output_weights=True)])
def test_statistics(config: ModelConfig) -> None:
    model = tiny_model(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = 0.02 / math.sqrt(2 * 8) if residual else 0.02
            error = 4 / math.sqrt(parameter.numel())  # four standard errors of the mean, more than that of the std
            assert parameter.std().item() == pytest.approx(std, rel=error), name
            assert abs(parameter.mean().item()) < std * error, name


def test_std_comes_from_the_configuration() -> None:
    model = tiny_model(replace(WIDE, init_method_std=0.5))
    assert model.embedding.weight.std().item() == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("config", [GPT2, LLAMA])
def test_weights_depend_on_the_seed_only(config: ModelConfig) -> None:
    first = tiny_model(config, seed=1).state_dict()
    torch.manual_seed(99)
    second = tiny_model(config, seed=1).state_dict()
    other = tiny_model(config, seed=2).state_dict()
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    drawn = [name for name, value in first.items() if value.std() > 0]
    assert drawn
    assert not any(torch.equal(first[name], other[name]) for name in drawn)


def test_the_default_generator_is_used_only_without_another() -> None:
    before = torch.get_rng_state()
    tiny_model(LLAMA)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(7)
    default = GPTModel(LLAMA)
    assert all(torch.equal(a, b) for a, b in zip(default.parameters(), tiny_model(LLAMA).parameters(), strict=True))


def test_bfloat16_weights_are_the_float32_ones_rounded() -> None:
    rounded = tiny_model(LLAMA, dtype=torch.bfloat16)
    for half, full in zip(rounded.parameters(), tiny_model(LLAMA).parameters(), strict=True):
        assert half.dtype == torch.bfloat16
        assert torch.equal(half, full.bfloat16())
    assert rounded.rotary.table.dtype == torch.float32


@pytest.mark.parametrize("config", [GPT2, LLAMA])
def test_every_weight_and_table_is_filled_again_after_to_empty(config: ModelConfig) -> None:
    model = GPTModel(config, device="meta").to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        nn.init.constant_(tensor, math.nan)
    initialize_weights(model, WeightInitializer(std=0.02, num_layers=config.num_layers, generator=seeded()))
    batch = tiny_batch(config)
    assert torch.equal(model(**batch), tiny_model(config)(**batch))


def test_a_layer_alone_can_be_initialised() -> None:
    layer = TransformerLayer(TINY)
    initialize_weights(layer, WeightInitializer(std=0.1, num_layers=2, generator=seeded()))
    assert layer.attention.out.weight.std().item() == pytest.approx(0.05, rel=0.1)


def test_modules_of_others_are_left_alone() -> None:
    linear = nn.Linear(3, 3)
    before = linear.weight.clone()
    initialize_weights(nn.Sequential(linear), WeightInitializer(std=0.1, num_layers=2))
    assert torch.equal(linear.weight, before)
