from __future__ import annotations

import copy
import itertools
import math
import pickle
from dataclasses import replace

import pytest
import torch
from tests.models.tiny import GPT2, LLAMA, TINY, seeded, tiny_batch, tiny_model

from graphstep.config.model import ModelConfig
from graphstep.errors import ConfigError, UserInputError
from graphstep.models import GPTModel, SegmentedModule

BOTH = pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])


@BOTH
def test_shapes(config: ModelConfig) -> None:
    model, batch = tiny_model(config), tiny_batch(config)
    assert model(batch["tokens_BS"]).shape == (2, 12, 40)
    loss = model(**batch)
    assert loss.shape == ()
    assert loss.dtype == torch.float32
    assert len(model.layers) == 2
    assert all(isinstance(layer, SegmentedModule) for layer in model.layers)


@BOTH
def test_bfloat16(config: ModelConfig) -> None:
    model, batch = tiny_model(config, dtype=torch.bfloat16), tiny_batch(config)
    assert model(batch["tokens_BS"]).dtype == torch.bfloat16
    loss = model(**batch)
    assert loss.dtype == torch.float32
    loss.backward()
    assert loss.item() == pytest.approx(tiny_model(config)(**batch).item(), rel=1e-2)


@BOTH
def test_autocast(config: ModelConfig) -> None:
    model, batch = tiny_model(config), tiny_batch(config)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**batch)
    loss.backward()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(model(**batch).item(), rel=1e-2)


@BOTH
@pytest.mark.parametrize("vocab_size", [40, 1000])
def test_loss_at_the_start_is_close_to_that_of_guessing(config: ModelConfig, vocab_size: int) -> None:
    config = replace(config, vocab_size=vocab_size)
    loss = tiny_model(config)(**tiny_batch(config, batch=8))
    assert loss.item() == pytest.approx(math.log(vocab_size), abs=0.05)


@BOTH
def test_a_later_token_does_not_change_earlier_logits(config: ModelConfig) -> None:
    model, tokens = tiny_model(replace(config, init_method_std=0.2)), tiny_batch(config)["tokens_BS"]
    logits = model(tokens)
    for place in (11, 5, 1):
        changed = tokens.clone()
        changed[:, place] = (changed[:, place] + 1) % 40
        changed_logits = model(changed)
        assert torch.equal(changed_logits[:, :place], logits[:, :place])
        assert not torch.isclose(changed_logits[:, place:], logits[:, place:]).all(dim=-1).any()


@BOTH
def test_sequences_of_a_batch_are_independent(config: ModelConfig) -> None:
    model, tokens = tiny_model(config), tiny_batch(config, batch=3)["tokens_BS"]
    torch.testing.assert_close(model(tokens)[1:2], model(tokens[1:2]))


@pytest.mark.parametrize(
    ("normalization", "positions", "bias", "num_groups", "swiglu", "untied"),
    list(
        itertools.product(
            ("LayerNorm", "RMSNorm"),
            ("learned_absolute", "rope", "none"),
            (True, False),
            (4, 1),
            (True, False),
            (True, False),
        )
    ),
)
def test_every_combination_trains(
    normalization: str, positions: str, bias: bool, num_groups: int, swiglu: bool, untied: bool
) -> None:
    config = replace(
        TINY,
        num_layers=1,
        normalization=normalization,
        position_embedding_type=positions,
        add_bias_linear=bias,
        num_query_groups=num_groups,
        swiglu=swiglu,
        untie_embeddings_and_output_weights=untied,
        hidden_dropout=0.1,
        attention_dropout=0.1,
    )
    model, batch = tiny_model(config), tiny_batch(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = model(**batch)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.any(), name
    optimizer.step()
    model.eval()
    assert model(**batch) < loss


@BOTH
def test_it_overfits_a_tiny_batch(config: ModelConfig) -> None:
    model, batch = tiny_model(config), tiny_batch(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05


@pytest.mark.parametrize(("config", "num_parameters"), [(GPT2, 16864), (LLAMA, 18080)], ids=["gpt2", "llama"])
def test_num_parameters(config: ModelConfig, num_parameters: int) -> None:
    # gpt2: 40*32 + 16*32 + 2 * (96*32+96 + 32*32+32 + 48*32+48 + 32*48+32 + 4*32) + 2*32
    # llama: 2*40*32 + 2 * (64*32 + 32*32 + 96*32 + 32*48 + 2*32) + 32
    assert tiny_model(config).num_parameters() == num_parameters


@BOTH
def test_copies_and_pickles(config: ModelConfig) -> None:
    model, batch = tiny_model(config), tiny_batch(config)
    expected = model(**batch)
    assert torch.equal(copy.deepcopy(model)(**batch), expected)
    assert torch.equal(pickle.loads(pickle.dumps(model))(**batch), expected)
    fresh = tiny_model(config, seed=8)
    fresh.load_state_dict(model.state_dict())
    assert torch.equal(fresh(**batch), expected)


@BOTH
def test_a_sequence_longer_than_the_positions_is_refused(config: ModelConfig) -> None:
    tokens = torch.zeros(1, 17, dtype=torch.int64)
    with pytest.raises(UserInputError, match=r"17 tokens, the model has positions for 16(.|\n)*--max-position-emb"):
        tiny_model(config)(tokens)
    assert tiny_model(replace(config, position_embedding_type="none"))(tokens).shape == (1, 17, 40)


def test_the_vocabulary_has_to_be_known() -> None:
    with pytest.raises(ConfigError, match="vocabulary size of the model is not set"):
        GPTModel(replace(TINY, vocab_size=0), generator=seeded())
