"""Plans for models of others: layers and their parts are found by structure, and memory comes out as predicted."""

from __future__ import annotations

import pytest
import torch
from tests.planning.test_predict import COSTS

import graphstep
from graphstep.planning import Measured, plan_step

transformers = pytest.importorskip("transformers")


def test_a_llama() -> None:
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 64, (2, 16))

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()

    plan = plan_step(step, model, costs=COSTS, num_timed=2)
    found = {each.candidate.name: each for each in plan.predictions}
    assert {"self_attn", "mlp", "input_layernorm", "whole layers", "whole step"} <= set(found)
    layers = found["whole layers"]
    assert layers.candidate.regions == {"model.layers.*": "layer"}
    assert layers.num_graphs == 4
    inside = [found[name].num_captured for name in ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")]
    assert 0 < layers.num_captured - sum(inside) <= 8  # The sums of the residual stream.
    with graphstep.attach(model, regions=layers.candidate.regions) as manager:
        for _ in range(3):
            step()
        measured = Measured.of(manager.report())
    assert measured.pool_bytes == pytest.approx(layers.pool_bytes, rel=0.05)
    assert measured.static_bytes == layers.static_bytes
