"""The forward over steps: what it refuses, and that it leaves the model as it was."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from tests.inference.generation import LLAMA, build_engine, build_model, greedy, prompts
from tests.models.tiny import seeded

from graphstep.errors import ConfigError
from graphstep.inference.attention import TorchAttention
from graphstep.inference.cache import CacheShape, InferenceCache
from graphstep.inference.fusions import TorchFusions
from graphstep.inference.model_steps import ModelSteps
from graphstep.models import DelayedScaling, GPTModel, SegmentedModule


def steps_of(model: GPTModel) -> ModelSteps:
    return ModelSteps(model, InferenceCache(CacheShape.of(model), 4, 4, 2, "cpu"), TorchAttention(), TorchFusions())


def test_layers_of_others_are_refused_by_name() -> None:
    model = build_model("llama")
    model.layers[0] = SegmentedModule()
    with pytest.raises(ConfigError, match=r"(?s)SegmentedModule cannot be run step by step.*layers\.0"):
        steps_of(model)


def test_fp8_is_refused() -> None:
    config = replace(LLAMA, hidden_size=32, kv_channels=8, ffn_hidden_size=48)
    model = GPTModel(config, generator=seeded(), fp8=DelayedScaling())
    with pytest.raises(ConfigError, match=r"layers\.0\.attention\.qkv multiplies in fp8"):
        steps_of(model)


def test_every_module_is_called_as_in_the_forward() -> None:
    """Hooks see what they would see there: none of the modules with weights is passed by, but for experts."""
    model = build_model("hybrid")
    calls: Counter[str] = Counter()
    for name, module in model.named_modules():
        if name.endswith(("qkv", "out", "up", "down", "_norm", "head")):
            module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    model(torch.tensor([[1, 2]]))
    wanted = dict(calls)
    calls.clear()
    with build_engine(model) as engine:
        engine.generate(prompts(2), greedy(1))
    assert dict(calls) == wanted
