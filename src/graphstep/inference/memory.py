"""How much of a GPU's memory the cache may have: what is left beside graphs and the largest step, measured before."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

import torch

from graphstep.capture import GraphSession
from graphstep.inference.attention import attention_for
from graphstep.inference.cache import CacheShape, InferenceCache
from graphstep.inference.engine_config import EngineConfig
from graphstep.inference.fusions import fusions_for
from graphstep.inference.ladder import Ladder
from graphstep.inference.metadata import StepMetadata
from graphstep.inference.model_steps import ModelSteps
from graphstep.inference.runner import StepRunner
from graphstep.inference.shapes import BatchLimits, BatchShape
from graphstep.inference.step import dummy_step
from graphstep.models import GPTModel

_SHARE_LEFT_FREE: Final = 0.02
"""Of the free memory: fragments, and what libraries take later."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """What an engine needs beside its cache, in bytes."""

    graph_bytes: int
    """Of the largest bucket; the others find their memory in its pool."""
    step_bytes: int
    """Of the largest step outside of graphs, at its peak."""
    free_bytes: int
    """Free on the device before any of it, the weights already there."""

    @property
    def cache_bytes(self) -> int:
        """What is left for the cache."""
        left = self.free_bytes - self.graph_bytes - self.step_bytes
        return max(0, int(left - self.free_bytes * _SHARE_LEFT_FREE))

    def lines(self) -> tuple[str, ...]:
        """Say it in words, a line each."""
        return (
            f"memory of graphs: {self.graph_bytes / 1e9:.3f} GB",
            f"memory of the largest step without a graph: {self.step_bytes / 1e9:.3f} GB",
            f"memory that is left for the cache: {self.cache_bytes / 1e9:.3f} GB of {self.free_bytes / 1e9:.3f} GB",
        )


@dataclass(frozen=True, slots=True)
class CachePlan:
    """How large a cache is going to be, and why."""

    num_blocks: int
    """The reserved one included."""
    measured: MeasuredMemory | None = None
    """What the device needs beside it; ``None`` where the number was given, and on the CPU."""


def plan_cache(
    model: GPTModel, shape: CacheShape, config: EngineConfig, limits: BatchLimits, metadata: StepMetadata
) -> CachePlan:
    """Choose the number of blocks: as configured, or what the budget holds, on a GPU cut to what will be free.

    The graphs' memory is measured and reported first, so that a cache never takes what they will need.

    Raises:
        ConfigError: there is no room for a block that requests could use.
        CaptureError: the largest graph cannot be captured, and has to be.
    """
    if config.num_blocks is not None:
        return CachePlan(config.num_blocks)
    measured = None
    block_size = config.inference.inference_dynamic_batching_block_size
    budget = config.budget_bytes
    device = model.embedding.weight.device
    if device.type == "cuda":
        measured = measure_memory(model, shape, config, limits, metadata)
        for line in measured.lines():
            _log.info("%s", line)
        if measured.cache_bytes < budget:
            _log.warning(
                "the cache gets %.3f GB instead of %.3f GB: no more is left", measured.cache_bytes / 1e9, budget / 1e9
            )
            budget = measured.cache_bytes
    number = shape.num_blocks(budget, block_size, limits.max_requests)
    useful = limits.max_requests * -(-limits.max_sequence_length // block_size)
    # The reserved block, and those that the scheduler leaves free when it admits a request beside others.
    useful += 2 + useful // 99
    # More than all requests can hold serves known prefixes alone; on the CPU it is rather left to others.
    keeps_prefixes = config.prefix_caching and not shape.mixers and device.type == "cuda"
    return CachePlan(number if keeps_prefixes else min(number, useful), measured)


def measure_memory(
    model: GPTModel, shape: CacheShape, config: EngineConfig, limits: BatchLimits, metadata: StepMetadata
) -> MeasuredMemory:
    """Run the largest step, and capture the largest bucket in a session that is closed again, over a tiny cache."""
    device = model.embedding.weight.device
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info(device)
    block_size = config.inference.inference_dynamic_batching_block_size
    cache = InferenceCache(shape, 2, block_size, 0, device)  # dummy steps use what is reserved alone
    steps = ModelSteps(
        model,
        cache,
        attention_for(device, shape.dtype, is_batch_invariant=config.inference.batch_invariant_mode),
        fusions_for(device),
    )
    step_bytes = _measure_step(steps, limits, metadata, device)
    ladder = config.ladder(limits, has_states=steps.has_states)
    graph_bytes = 0
    if ladder.buckets:
        largest = max(ladder.buckets)
        with GraphSession(device) as session:
            runner = StepRunner(
                steps,
                metadata,
                session,
                scope=config.scope,
                ladder=Ladder((largest,), (largest.tokens,)),
                limits=limits,
                is_required=config.is_required,
            )
            runner.capture_all(show_progress=False)
            graph_bytes = sum(graphs.pool_bytes for graphs in runner.graphs)
    cache.release()
    torch.cuda.empty_cache()
    return MeasuredMemory(graph_bytes, step_bytes, free_bytes)


@torch.no_grad()
def _measure_step(steps: ModelSteps, limits: BatchLimits, metadata: StepMetadata, device: torch.device) -> int:
    num_prefill = min(limits.max_requests, max(1, -(-limits.max_tokens // limits.max_sequence_length)))
    tokens = min(limits.max_tokens, num_prefill * limits.max_sequence_length)
    shape = BatchShape(tokens, num_prefill, 0)
    step = dummy_step(shape, limits.max_sequence_length)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    logits = steps.forward(metadata.fill(step, limits.eager_shape(shape)), step)
    logits.float().softmax(-1)  # a part of drawing
    return torch.cuda.max_memory_allocated(device) - before
