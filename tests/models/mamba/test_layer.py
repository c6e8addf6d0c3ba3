"""The layer is one segment, and its recordings equal eager."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.models.mamba.small import CONFIG, SIZES
from tests.models.tiny import gradients, seeded
from torch import Tensor

from graphstep.config.switches import CudaGraphModule
from graphstep.engine import Engine, engine_for
from graphstep.models import WeightInitializer, initialize_weights
from graphstep.models.mamba import MambaLayer


def built(*, dropout: float = 0.0, **options: object) -> MambaLayer:
    layer = MambaLayer(replace(CONFIG, hidden_dropout=dropout), SIZES, **options)
    initialize_weights(layer, WeightInitializer(std=0.3, num_layers=1, generator=seeded()))
    return layer


def test_one_segment_covers_the_layer() -> None:
    layer = built()
    (segment,) = layer.segments()
    assert segment.kind == CudaGraphModule.mamba.value
    assert layer.get_submodule(segment.name) in segment.modules
    owned = [id(parameter) for module in segment.modules for parameter in module.parameters()]
    assert sorted(owned) == sorted(id(parameter) for parameter in layer.parameters())


def test_context_is_ignored_and_the_residual_is_added() -> None:
    layer = built()
    x = torch.randn(2, 12, CONFIG.hidden_size)
    assert torch.equal(layer(x, torch.randn(12, 8), torch.randn(12, 8)), x + layer.mixer(layer.mixer_norm(x)))


def test_dropout_hits_the_update_not_the_residual() -> None:
    layer = built(dropout=0.999999)
    x = torch.randn(2, 12, CONFIG.hidden_size)
    torch.testing.assert_close(layer(x), x)
    layer.eval()
    assert not torch.allclose(layer(x), x)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    opened = engine_for(torch.device(request.param))
    yield opened
    opened.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("length", "chunk_size"), [(12, 256), (32, 8), (13, 8)])
def test_replays_equal_eager(length: int, chunk_size: int, dtype: torch.dtype, engine: Engine) -> None:
    def step(layer: MambaLayer, x: Tensor) -> Tensor:
        y: Tensor = layer(x)
        y.float().square().sum().backward()
        return y.detach()

    captured, eager = (built(dropout=0.2, chunk_size=chunk_size, device=engine.device, dtype=dtype) for _ in range(2))
    batches = [torch.randn(2, length, CONFIG.hidden_size).to(engine.device, dtype) for _ in range(3)]
    static = batches[0].clone()
    with engine.capture_stream():
        step(captured, static)
        captured.zero_grad(set_to_none=False)
        recording = engine.capture(lambda: step(captured, static))
    torch.manual_seed(5)
    expected = [step(eager, batch) for batch in batches]
    torch.manual_seed(5)
    for batch, wanted in zip(batches, expected, strict=True):
        static.copy_(batch)
        recording.replay()
        engine.synchronize()
        assert torch.equal(recording.result, wanted)
    of_eager = gradients(eager)
    for name, grad in gradients(captured).items():
        assert torch.equal(grad, of_eager[name]), name


def test_decoding_replays(engine: Engine) -> None:
    mixer = built(chunk_size=8, device=engine.device).mixer
    x = torch.randn(2, 10, CONFIG.hidden_size, device=engine.device)
    expected, states = mixer.new_states(2), mixer.new_states(2)
    mixer.forward_with_state(x[:, :5], *expected)
    token = x[:, 0].clone()
    with engine.capture_stream():
        mixer.step(token, *states)
        recording = engine.capture(lambda: mixer.step(token, *states))
    mixer.forward_with_state(x[:, :5], *states)
    for t in range(5, 10):
        token.copy_(x[:, t])
        recording.replay()
        engine.synchronize()
        assert torch.equal(recording.result, mixer.step(x[:, t], *expected))
    assert all(torch.equal(*pair) for pair in zip(states, expected, strict=True))
