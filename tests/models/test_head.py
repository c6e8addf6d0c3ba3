from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tests.models.tiny import TINY, seeded, tiny_batch, tiny_model

from graphstep.models import OutputHead, initialize_weights, token_cross_entropy
from graphstep.models.initialization import WeightInitializer


def test_cross_entropy_formula() -> None:
    logits, labels = torch.randn(2, 5, 40), torch.randint(40, (2, 5))
    total = 0.0
    for row in range(2):
        for place in range(5):
            values = logits[row, place].double()
            total += (values.exp().sum().log() - values[labels[row, place]]).item()
    assert token_cross_entropy(logits, labels).item() == pytest.approx(total / 10, rel=1e-6)


def test_cross_entropy_of_bfloat16_logits_is_that_of_their_values_in_float32() -> None:
    logits, labels = torch.randn(2, 5, 40).bfloat16().requires_grad_(), torch.randint(40, (2, 5))
    loss = token_cross_entropy(logits, labels)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, token_cross_entropy(logits.float(), labels))
    loss.backward()
    assert logits.grad.dtype == torch.bfloat16


def test_uniform_logits_cost_the_logarithm_of_the_vocabulary() -> None:
    loss = token_cross_entropy(torch.zeros(1, 3, 64), torch.zeros(1, 3, dtype=torch.int64))
    assert loss.item() == pytest.approx(math.log(64))


@pytest.mark.parametrize("untied", [True, False])
def test_projection_of_the_normalised_hidden_states(untied: bool) -> None:
    head = OutputHead(replace(TINY, untie_embeddings_and_output_weights=untied))
    initialize_weights(head, WeightInitializer(std=0.5, num_layers=1, generator=seeded()))
    embedding_weight = torch.randn(40, 32)
    hidden = torch.randn(2, 5, 32)
    weight = head.weight if untied else embedding_weight
    expected = torch.nn.functional.layer_norm(hidden, (32,)) @ weight.T
    torch.testing.assert_close(head(hidden, embedding_weight), expected, rtol=1e-4, atol=1e-5)


def test_tied_weights_are_one_parameter_with_both_gradients() -> None:
    tied = tiny_model()
    untied = tiny_model(replace(TINY, untie_embeddings_and_output_weights=True))
    untied.load_state_dict({**tied.state_dict(), "head.weight": tied.embedding.weight.detach()})
    batch = tiny_batch()
    for model in (tied, untied):
        model(**batch).backward()
    both = untied.embedding.weight.grad + untied.head.weight.grad
    torch.testing.assert_close(tied.embedding.weight.grad, both)
    assert untied.num_parameters() - tied.num_parameters() == 40 * 32
    assert not any(name.startswith("head.weight") for name in tied.state_dict())


def test_padding_of_the_vocabulary_learns_to_be_improbable() -> None:
    config = replace(TINY, vocab_size=64)
    model, batch = tiny_model(config), tiny_batch(TINY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        model(**batch).backward()
        optimizer.step()
    probabilities = model(batch["tokens_BS"]).softmax(-1)
    assert probabilities.shape == (2, 12, 64)
    assert probabilities[..., 40:].sum(-1).max().item() < 0.02
