"""The forward suits capture: no host reads, nothing random without dropout, no state, and replays equal eager."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.models.tiny import GPT2, LLAMA, gradients, logged_kernels, tiny_batch, tiny_model
from torch import Tensor

from graphstep.config.model import ModelConfig
from graphstep.engine import Engine, engine_for
from graphstep.models import GPTModel

BOTH = pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
# What would draw, read back, or make a tensor from Python values.
UNWANTED = {"native_dropout", "bernoulli", "bernoulli_", "_local_scalar_dense", "arange", "scalar_tensor", "nonzero"}
UNWANTED |= {"fill_", "zeros", "ones", "full", "tril", "lift_fresh_copy"}


@BOTH
def test_the_forward_runs_on_the_meta_device(config: ModelConfig) -> None:
    with torch.device("meta"):
        model = GPTModel(config)
        tokens = torch.empty(2, 12, dtype=torch.int64)
        loss = model(tokens, tokens)
        loss.backward()
    assert loss.is_meta
    assert model(tokens).shape == (2, 12, 40)
    assert all(parameter.is_meta and parameter.grad.is_meta for parameter in model.parameters())


@BOTH
def test_dropout_of_zero_draws_nothing_and_launches_nothing(config: ModelConfig) -> None:
    model, batch = tiny_model(config), tiny_batch(config)
    model.train()
    before = torch.get_rng_state()
    with logged_kernels() as in_training:
        model(**batch)
    assert torch.equal(torch.get_rng_state(), before)
    model.eval()
    with logged_kernels() as in_evaluation:
        model(**batch)
    assert in_training == in_evaluation
    assert UNWANTED.isdisjoint(in_training)


@BOTH
def test_dropout_is_off_in_evaluation(config: ModelConfig) -> None:
    model, batch = tiny_model(replace(config, hidden_dropout=0.3, attention_dropout=0.3)), tiny_batch(config)
    assert not torch.equal(model(**batch), model(**batch))
    model.eval()
    before = torch.get_rng_state()
    assert torch.equal(model(**batch), tiny_model(config)(**batch))
    assert torch.equal(torch.get_rng_state(), before)


@BOTH
def test_the_forward_changes_no_state(config: ModelConfig) -> None:
    def state(module: torch.nn.Module) -> dict[str, object]:
        plain = {name: value for name, value in vars(module).items() if not name.startswith("_")}
        return {**plain, "buffers": {name: buffer._version for name, buffer in module._buffers.items()}}

    model, batch = tiny_model(config), tiny_batch(config)
    before = [state(module) for module in model.modules()]
    model(**batch).backward()
    assert [state(module) for module in model.modules()] == before


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    built = engine_for(torch.device(request.param))
    yield built
    built.close()


def step(model: GPTModel, batch: dict[str, Tensor]) -> Tensor:
    loss = model(**batch)
    loss.backward()
    return loss.detach()


@BOTH
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replays_equal_eager(config: ModelConfig, dropout: float, dtype: torch.dtype, engine: Engine) -> None:
    config = replace(config, hidden_dropout=dropout, attention_dropout=dropout)
    captured, eager = (tiny_model(config, device=engine.device, dtype=dtype) for _ in range(2))
    batches = [{k: v.to(engine.device) for k, v in tiny_batch(config, seed=s).items()} for s in range(3)]
    static = {name: value.clone() for name, value in batches[0].items()}
    with engine.capture_stream():
        step(captured, static)
        captured.zero_grad(set_to_none=False)
        recording = engine.capture(lambda: step(captured, static))
    torch.manual_seed(5)
    eager_losses = [step(eager, batch).item() for batch in batches]
    replayed_losses = []
    torch.manual_seed(5)
    for batch in batches:
        for name, value in batch.items():
            static[name].copy_(value)
        recording.replay()
        engine.synchronize()
        replayed_losses.append(recording.result.item())
    assert replayed_losses == eager_losses
    expected = gradients(eager)
    for name, grad in gradients(captured).items():
        assert torch.equal(grad, expected[name]), name
