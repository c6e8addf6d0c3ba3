"""Limits and buckets of an engine, from its options and its model."""

from __future__ import annotations

from typing import Any

import pytest
from tests.inference.generation import build_model

from graphstep.config import InferenceConfig, InferenceCudaGraphScope, from_argv
from graphstep.errors import ConfigError
from graphstep.inference.cache import CacheShape
from graphstep.inference.engine_config import EngineConfig
from graphstep.inference.shapes import BatchLimits


def limits_of(kind: str = "llama", *, options: dict[str, Any] | None = None, **more: Any) -> BatchLimits:
    model = build_model(kind)
    options = {"inference_dynamic_batching_block_size": 4} | (options or {})
    return EngineConfig(inference=InferenceConfig(**options), **more).limits(model, CacheShape.of(model))


def test_sequences_are_as_long_as_the_model_has_positions() -> None:
    assert limits_of().max_sequence_length == 32
    assert limits_of(max_sequence_length=20).max_sequence_length == 20


def test_all_that_does_not_fit_is_said_at_once() -> None:
    options = {
        "num_speculative_tokens": 3,
        "inference_dynamic_batching_unified_memory_level": 1,
        "inference_dynamic_batching_sampling_backend": "flashinfer",
    }
    with pytest.raises(ConfigError) as caught:
        limits_of(max_sequence_length=64, options=options)
    codes = {problem.code for problem in caught.value.problems}
    assert codes == {
        "inference-speculative",
        "inference-unified-memory",
        "inference-sampling-backend",
        "inference-sequence-length",
    }


def test_requests_are_so_many_as_the_cache_can_hold_at_their_longest() -> None:
    assert limits_of(num_blocks=25).max_requests == 3
    assert limits_of(num_blocks=3).max_requests == 1
    assert limits_of().max_requests == 256


def test_tokens_are_a_multiple_where_results_may_not_depend_on_the_batch() -> None:
    options = {"batch_invariant_mode": True, "inference_dynamic_batching_max_requests": 2100}
    assert limits_of(options=options).max_tokens == 2112


def test_recurrent_states_have_graphs_for_decode_alone() -> None:
    limits = BatchLimits(max_requests=4, max_tokens=16, max_sequence_length=32)
    config = EngineConfig(scope=InferenceCudaGraphScope.block)
    assert any(not bucket.is_decode_only for bucket in config.ladder(limits, has_states=False).buckets)
    assert all(bucket.is_decode_only for bucket in config.ladder(limits, has_states=True).buckets)
    assert config.ladder(limits, has_states=True).buckets
    assert not EngineConfig().ladder(limits, has_states=False).buckets


@pytest.mark.parametrize(
    ("more", "scope", "is_required"),
    [
        ("", "block", True),
        ("--cuda-graph-policy auto", "block", False),
        ("--cuda-graph-policy off", "none", False),
        ("--inference-cuda-graph-scope layer --cuda-graph-warmup-steps 5", "layer", True),
    ],
)
def test_options_of_a_command_line(more: str, scope: str, is_required: bool) -> None:
    argv = "--cuda-graph-impl local --inference-cuda-graph-scope block --cuda-graph-policy required --seed 7 " + more
    config = EngineConfig.of_run(from_argv(argv.split(), {}), max_sequence_length=9)
    assert config.scope == scope
    assert config.is_required is is_required
    assert config.seed == 7
    assert config.max_sequence_length == 9
    assert config.num_warmup_runs == (5 if "warmup" in more else 3)
