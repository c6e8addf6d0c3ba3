"""Limits and buckets of an engine, from its options and its model."""

from __future__ import annotations

from typing import Any

import pytest
from tests.inference.generation import build_model, greedy, prompts

from graphstep.config import InferenceConfig, InferenceCudaGraphScope, from_argv
from graphstep.errors import ConfigError
from graphstep.inference.cache import CacheShape
from graphstep.inference.engine import DynamicEngine
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
    assert limits_of(num_blocks=26).max_requests == 3
    assert limits_of(num_blocks=25).max_requests == 2, "one block stays free when a request joins others"
    assert limits_of(num_blocks=3).max_requests == 1
    assert limits_of().max_requests == 32
    assert limits_of(options={"inference_dynamic_batching_max_requests": 300}).max_requests == 300


def test_states_take_their_part_of_the_budget() -> None:
    shape = CacheShape.of(build_model("hybrid"))
    budget = 9 * shape.slot_bytes() + 60 * shape.block_bytes(4)
    options = {"inference_dynamic_batching_buffer_size_gb": budget / 1e9}
    requests = limits_of("hybrid", options=options).max_requests
    blocks = shape.num_blocks(budget, 4, requests)
    assert 1 < requests < 32
    assert blocks - 1 >= requests * 8 + 1
    more = (budget - shape.slot_bytes() * (requests + 2)) // shape.block_bytes(4)
    assert more - 1 < (requests + 1) * 8 + 1, "one more request would fit"


@pytest.mark.parametrize("vocabulary", [0, -1, 41, 2.5])
def test_a_vocabulary_that_the_model_does_not_have(vocabulary: Any) -> None:
    with pytest.raises(ConfigError, match="tokens, and the model has 40"):
        DynamicEngine(build_model("llama"), EngineConfig(vocabulary=vocabulary, num_blocks=4))


def test_no_more_requests_than_there_are_going_to_be() -> None:
    assert limits_of(expected_requests=3).max_requests == 3
    assert limits_of(expected_requests=3000).max_requests == 32
    assert limits_of(expected_requests=3, options={"inference_dynamic_batching_max_requests": 7}).max_requests == 7


@pytest.mark.parametrize("num_blocks", [2, 9, 17, 18, 19, 26, 33, 34])
def test_the_requests_of_a_given_cache_run_side_by_side(num_blocks: int) -> None:
    """Prompts as long as they can be are all computed in one step."""
    options = InferenceConfig(inference_dynamic_batching_block_size=4)
    with DynamicEngine(build_model("llama"), EngineConfig(inference=options, num_blocks=num_blocks)) as engine:
        number = engine.limits.max_requests
        length = min(31, (num_blocks - 1) * 4)
        engine.generate(prompts(*[length] * number), greedy(1))
        assert engine.counts.steps == 1


def test_graphs_for_prompts_of_recurrent_states_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    options = {"inference_cuda_graph_all_prefills": True}
    scope = InferenceCudaGraphScope.block
    with pytest.raises(ConfigError, match="recurrent states, which change by the length"):
        limits_of("hybrid", options=options, scope=scope, is_required=True)
    limits_of("hybrid", options=options, scope=scope)
    assert "only decode steps have graphs" in caplog.text
    caplog.clear()
    limits_of("llama", options=options, scope=scope, is_required=True)
    limits_of("hybrid", options=options, is_required=True)
    assert not caplog.records


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
