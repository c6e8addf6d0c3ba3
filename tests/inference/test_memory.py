"""The size of the cache: configured, from its budget, or what is left."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tests.inference.generation import LONGEST, VOCABULARY, build_engine, build_model, greedy, prompts

from graphstep.config import InferenceConfig, InferenceCudaGraphScope
from graphstep.errors import ConfigError
from graphstep.inference.cache import CacheShape, InferenceCache
from graphstep.inference.engine import DynamicEngine
from graphstep.inference.engine_config import EngineConfig
from graphstep.inference.memory import MeasuredMemory, measure_memory, plan_cache
from graphstep.inference.metadata import StepMetadata


def blocks_for(**options: float | int | None) -> int:
    model = build_model("llama")
    shape = CacheShape.of(model)
    num_blocks = options.pop("num_blocks", None)
    inference = InferenceConfig(
        inference_dynamic_batching_block_size=4, inference_dynamic_batching_max_requests=4, **options
    )
    config = EngineConfig(inference=inference, num_blocks=num_blocks)
    limits = config.limits(model, shape)
    return plan_cache(model, shape, config, limits, StepMetadata(limits, 4, "cpu")).num_blocks


def test_the_number_may_be_given() -> None:
    assert blocks_for(num_blocks=17) == 17


def test_the_budget_decides() -> None:
    each = CacheShape.of(build_model("llama")).block_bytes(4)
    assert blocks_for(inference_dynamic_batching_buffer_size_gb=20 * each / 1e9) == 20
    with pytest.raises(ConfigError, match="hold no block"):
        blocks_for(inference_dynamic_batching_buffer_size_gb=1 * each / 1e9)


def test_on_the_cpu_no_more_is_taken_than_requests_can_hold() -> None:
    # The reserved block, and the one that stays free when a request is admitted beside others.
    assert blocks_for() == 4 * 32 // 4 + 2


def test_graphs_and_steps_come_before_the_cache() -> None:
    assert MeasuredMemory(graph_bytes=100, step_bytes=50, free_bytes=1000).cache_bytes == 830
    assert MeasuredMemory(graph_bytes=900, step_bytes=500, free_bytes=1000).cache_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("scope", ["layer", "block"])
def test_what_was_measured_is_what_graphs_take(scope: str) -> None:
    model = build_model("llama", "cuda")
    with build_engine(model, scope, captures_at_start=True) as engine:
        shape, config = CacheShape.of(model), engine.config
        measured = measure_memory(model, shape, config, engine.limits, StepMetadata(engine.limits, 4, "cuda"))
        assert measured.graph_bytes > 0
        assert measured.step_bytes > 0
        taken = sum(graphs.pool_bytes for graphs in engine.runner.graphs)
        assert taken <= 2 * measured.graph_bytes
        engine.generate(prompts(3), greedy(2))
        torch.cuda.synchronize()


def test_memory_is_said_in_lines_of_its_own() -> None:
    assert MeasuredMemory(graph_bytes=int(1e9), step_bytes=int(5e8), free_bytes=int(1e10)).lines() == (
        "memory of graphs: 1.000 GB",
        "memory of the largest step without a graph: 0.500 GB",
        "memory that is left for the cache: 8.300 GB of 10.000 GB",
    )


@pytest.mark.gpu
def test_memory_of_graphs_is_reported_before_there_is_a_cache(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[list[str]] = []
    build = InferenceCache.__init__

    def watched(cache: InferenceCache, shape: CacheShape, num_blocks: int, *rest: Any) -> None:
        said.append([record.getMessage() for record in caplog.records])
        build(cache, shape, num_blocks, *rest)

    monkeypatch.setattr(InferenceCache, "__init__", watched)
    options = InferenceConfig(inference_dynamic_batching_block_size=4, inference_dynamic_batching_buffer_size_gb=0.01)
    config = EngineConfig(inference=options, scope=InferenceCudaGraphScope.block)
    with caplog.at_level(logging.INFO), DynamicEngine(build_model("llama", "cuda"), config) as engine:
        assert any(line.startswith("memory of graphs: ") for line in said[-1])
        assert engine.cache_plan.measured is not None
        assert engine.cache_plan.measured.graph_bytes > 0


@pytest.mark.parametrize("max_requests", [2, 7, 150])
def test_as_many_requests_as_there_can_be_run_side_by_side(max_requests: int) -> None:
    model = build_model("llama")
    options = InferenceConfig(
        inference_dynamic_batching_max_requests=max_requests,
        inference_dynamic_batching_max_tokens=3 * max_requests,
        inference_dynamic_batching_block_size=LONGEST,
    )
    with DynamicEngine(model, EngineConfig(inference=options)) as engine:
        engine.generate([[1, 2, number % VOCABULARY] for number in range(max_requests)], greedy(4))
        assert engine.counts.steps == 4
