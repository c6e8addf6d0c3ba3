from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.models.tiny import TINY, logged_kernels, seeded, tiny_batch

from graphstep.config.model import ModelConfig
from graphstep.models import Embedding, initialize_weights
from graphstep.models.initialization import WeightInitializer

ROPE = replace(TINY, position_embedding_type="rope")


def built(config: ModelConfig) -> Embedding:
    embedding = Embedding(config)
    initialize_weights(embedding, WeightInitializer(std=0.5, num_layers=1, generator=seeded()))
    return embedding


@pytest.mark.parametrize("num_positions", [12, 16])
def test_token_plus_position(num_positions: int) -> None:
    embedding = built(TINY)
    tokens = torch.randint(40, (2, num_positions))
    hidden = embedding(tokens)
    for row in range(2):
        for place in range(num_positions):
            expected = embedding.weight[tokens[row, place]] + embedding.position_weight[place]
            assert torch.equal(hidden[row, place], expected)


@pytest.mark.parametrize("num_positions", [12, 16])
def test_gradients_count_occurrences(num_positions: int) -> None:
    embedding = built(TINY)
    tokens = torch.randint(40, (3, num_positions))
    embedding(tokens).sum().backward()
    counts = torch.bincount(tokens.flatten(), minlength=40).float()
    assert torch.equal(embedding.weight.grad, counts[:, None].expand(40, 32))
    places = 3.0 * (torch.arange(16) < num_positions)
    assert torch.equal(embedding.position_weight.grad, places[:, None].expand(16, 32))


def test_no_position_weight_without_learned_positions() -> None:
    embedding = built(ROPE)
    assert embedding.position_weight is None
    assert list(embedding.state_dict()) == ["weight"]
    tokens = tiny_batch()["tokens_BS"]
    assert torch.equal(embedding(tokens), embedding.weight[tokens])


@pytest.mark.parametrize(("config", "kernels"), [(TINY, ["embedding", "add"]), (ROPE, ["embedding"])])
def test_launches(config: ModelConfig, kernels: list[str]) -> None:
    embedding, tokens = built(config), tiny_batch()["tokens_BS"]
    with logged_kernels() as launched:
        embedding(tokens)
    assert launched == kernels


def test_dropout_in_training_only() -> None:
    embedding, tokens = built(replace(TINY, hidden_dropout=0.5)), tiny_batch()["tokens_BS"]
    share = (embedding(tokens) == 0).float().mean().item()
    assert 0.4 < share < 0.6
    embedding.eval()
    assert torch.equal(embedding(tokens), built(TINY)(tokens))
