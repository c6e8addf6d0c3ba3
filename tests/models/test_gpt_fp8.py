"""The reference GPT with fp8 layers: its weights, its loss, and its replays."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tests.models.tiny import GPT2, LLAMA, gradients, tiny_batch, tiny_model
from torch import Tensor

from graphstep.config.model import ModelConfig
from graphstep.engine import engine_for
from graphstep.errors import ConfigError
from graphstep.models import DelayedScaling, GPTModel, float8_layers, initialize_weights, mark_first_microbatch
from graphstep.models.initialization import WeightInitializer

RECIPE = DelayedScaling(amax_history_len=4)
BOTH = pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])


@BOTH
def test_the_weights_are_those_of_the_model_without_fp8(config: ModelConfig) -> None:
    before = torch.get_rng_state()
    plain, model = tiny_model(config), tiny_model(config, fp8=RECIPE)
    assert torch.equal(torch.get_rng_state(), before)
    weights = dict(model.named_parameters())
    assert all(torch.equal(parameter, weights[name]) for name, parameter in plain.named_parameters())
    assert len(list(float8_layers(model))) == 4 * config.num_layers


@BOTH
def test_it_trains_close_to_the_model_without_fp8(config: ModelConfig) -> None:
    losses = []
    for fp8 in (None, RECIPE):
        model, batch = tiny_model(config, fp8=fp8), tiny_batch(config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(20):
            optimizer.zero_grad()
            mark_first_microbatch(model)
            loss = model(**batch)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    start = tiny_model(config)(**tiny_batch(config)).item()
    assert losses[1] < 0.8 * start
    # Far less than what was learnt; the products have three bits of mantissa.
    assert abs(losses[1] - losses[0]) < 0.1 * (start - losses[0])


def test_a_whole_step_with_its_mark_is_repeated_on_the_tape() -> None:
    """Two microbatches in one recording, the mark inside of it."""

    def step(model: GPTModel, batch: dict[str, Tensor]) -> Tensor:
        mark_first_microbatch(model)
        for parameter in model.parameters():
            parameter.grad.zero_()
        first, second = (model(**{k: v[row : row + 1] for k, v in batch.items()}) for row in range(2))
        (first + second).backward()
        return first.detach() + second.detach()

    def built() -> GPTModel:
        model = tiny_model(GPT2, fp8=RECIPE)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return model

    eager, captured, static = built(), built(), tiny_batch(GPT2)
    with_memory = engine_for("cpu")
    recording = with_memory.capture(lambda: step(captured, static))
    for turn in range(6):
        batch = tiny_batch(GPT2, seed=turn)
        for name, tensor in batch.items():
            static[name].copy_(tensor)
        expected = step(eager, batch)
        recording.replay()
        assert torch.equal(recording.result, expected)
        mine, theirs = gradients(captured), gradients(eager)
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
        assert all(map(torch.equal, captured.buffers(), eager.buffers()))
        with torch.no_grad():
            for model in (eager, captured):
                for parameter in model.parameters():
                    parameter.add_(parameter.grad, alpha=-0.1)
    with_memory.close()


def test_built_on_the_meta_device_and_filled() -> None:
    with torch.device("meta"):
        model = GPTModel(GPT2, fp8=RECIPE)
    model.to_empty(device="cpu")
    initialize_weights(model, WeightInitializer(std=0.02, num_layers=2))
    assert all(layer.scale.tolist() == [1.0] * 3 for layer in float8_layers(model))


def test_sizes_that_do_not_fit() -> None:
    with pytest.raises(ConfigError, match="multiples of 16"):
        GPTModel(dataclasses.replace(GPT2, ffn_hidden_size=40), fp8=RECIPE)
