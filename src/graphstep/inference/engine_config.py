"""What an engine is built with, and the limits that follow from it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Final

from graphstep.config import CapturePolicy, InferenceConfig, InferenceCudaGraphScope, RunConfig
from graphstep.errors import ConfigError, Problem
from graphstep.inference.cache import CacheShape, requests_of
from graphstep.inference.ladder import Ladder, build_ladder
from graphstep.inference.shapes import BATCH_INVARIANT_MULTIPLE, BatchLimits
from graphstep.models import GPTModel

_USUAL_REQUESTS: Final = 256
_USUAL_REQUESTS_ON_CPU: Final = 32
_USUAL_TOKENS: Final = 2048

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Options of a `DynamicEngine`."""

    inference: InferenceConfig = field(default_factory=InferenceConfig)
    """Sizes of batches, blocks and cache, and which shapes have graphs."""
    scope: InferenceCudaGraphScope = InferenceCudaGraphScope.none
    """What one graph covers."""
    is_required: bool = False
    """A step that should have a graph and cannot be captured is an error, not a warning."""
    captures_at_start: bool = True
    """Capture all shapes before the first request; otherwise each when it is first needed."""
    num_warmup_runs: int = 1
    """Eager forwards before the capture of a shape, at least one."""
    show_progress: bool | None = None
    """A bar while graphs are captured; ``None``: on terminals."""
    max_sequence_length: int | None = None
    """Most tokens of a request; ``None``: as many as the model has positions."""
    expected_requests: int | None = None
    """No more requests than this are going to be there at a time; ``None``: not known. Where the options name no
    number, neither places nor graphs are made for more: they would cost time and memory, and never be used."""
    num_blocks: int | None = None
    """Blocks of the cache, the reserved one included; ``None``: what its memory holds."""
    prefix_caching: bool = True
    """Requests with equal beginnings share blocks. Never with recurrent states, which blocks do not hold."""
    async_scheduling: bool = True
    """Launch each step before the tokens of the one before it are read, so that the device does not wait for the host.
    Tokens are the same without."""
    vocabulary: int | None = None
    """Tokens that there are, without those that pad the model's; ``None``: all of the model's."""
    seed: int = 0
    """Of requests that name none."""

    @classmethod
    def of_run(cls, run: RunConfig, **more: Any) -> EngineConfig:
        """Return what the options of a command line ask for.

        Args:
            run: all options.
            more: fields that no option sets, or that replace what the options say.
        """
        graphs = run.graphs
        is_off = graphs.policy is CapturePolicy.off
        fields = {
            "inference": run.inference,
            "scope": InferenceCudaGraphScope.none if is_off else graphs.inference_scope,
            "is_required": graphs.policy is CapturePolicy.required,
            "num_warmup_runs": max(1, graphs.warmup_steps),
            "seed": run.training.seed,
        }
        return cls(**(fields | more))

    def limits(self, model: GPTModel, cache: CacheShape) -> BatchLimits:
        """The largest step.

        Raises:
            ConfigError: sizes that do not fit the model or each other; all problems at once.
        """
        options = self.inference
        positions = model.config.max_position_embeddings
        longest = positions if self.max_sequence_length is None else self.max_sequence_length
        problems = list(_problems_of_options(options))
        if longest > positions and model.config.position_embedding_type != "none":
            what = f"sequences of {longest} tokens, and the model has positions for {positions}"
            problems.append(
                Problem("inference-sequence-length", what, "EngineConfig.max_sequence_length", f"use {positions}")
            )
        asks_for_prompts = options.inference_cuda_graph_all_prefills and self.scope is not InferenceCudaGraphScope.none
        if cache.mixers and asks_for_prompts:
            what = "graphs for prompts, and this model has recurrent states, which change by the length of each prompt"
            option = "--inference-cuda-graph-all-prefills"
            if self.is_required:
                problems.append(Problem("inference-prefill-states", what, option, "leave it out: decode has graphs"))
            else:
                _log.warning("%s asks for %s: only decode steps have graphs", option, what)
        if problems:
            raise ConfigError(problems)
        multiple = BATCH_INVARIANT_MULTIPLE if options.batch_invariant_mode else 1
        requests = options.inference_dynamic_batching_max_requests
        if requests is None:
            requests = self._usual_requests(cache, longest, model.embedding.weight.device.type)
        tokens = options.inference_dynamic_batching_max_tokens
        if tokens is None:
            tokens = math.ceil(max(_USUAL_TOKENS, requests) / multiple) * multiple
        return BatchLimits(
            max_requests=requests,
            max_tokens=tokens,
            max_sequence_length=longest,
            batch_invariant=options.batch_invariant_mode,
        )

    def vocabulary_of(self, model: GPTModel) -> int:
        """Tokens that there are.

        Raises:
            ConfigError: more than the model has, or none.
        """
        most, wanted = model.config.vocab_size, self.vocabulary
        if wanted is None:
            return most
        if not isinstance(wanted, int) or not 0 < wanted <= most:
            what = f"{wanted} tokens, and the model has {most}"
            raise ConfigError(Problem("inference-vocabulary", what, "EngineConfig.vocabulary", "leave it out"))
        return wanted

    def ladder(self, limits: BatchLimits, *, has_states: bool) -> Ladder:
        """The buckets; for decode alone where there are recurrent states, because prompts change them by length."""
        if self.scope is InferenceCudaGraphScope.none:
            return Ladder((), ())
        options = self.inference
        if has_states:
            options = replace(options, decode_only_cuda_graphs=True, inference_cuda_graph_all_prefills=False)
        return build_ladder(options, limits, options.inference_dynamic_batching_num_cuda_graphs)

    @property
    def budget_bytes(self) -> int:
        """Memory of the cache."""
        return int(self.inference.inference_dynamic_batching_buffer_size_gb * 1e9)

    def _usual_requests(self, cache: CacheShape, longest: int, device_type: str) -> int:
        """As many as the cache holds at their longest, up to what a device gains from."""
        most = _USUAL_REQUESTS_ON_CPU if device_type == "cpu" else _USUAL_REQUESTS
        most = most if self.expected_requests is None else max(1, min(most, self.expected_requests))
        block_size = self.inference.inference_dynamic_batching_block_size
        blocks_each = math.ceil(longest / block_size)
        if self.num_blocks is not None:
            return min(most, requests_of(self.num_blocks, blocks_each))
        return cache.num_requests(self.budget_bytes, block_size, blocks_each, most)


def _problems_of_options(options: InferenceConfig) -> Iterator[Problem]:
    """What is asked for and this engine does not do."""
    if options.num_speculative_tokens:
        what = f"{options.num_speculative_tokens} tokens guessed ahead, which this engine does not do"
        yield Problem("inference-speculative", what, "--num-speculative-tokens", "leave it out")
    level = options.inference_dynamic_batching_unified_memory_level
    if level:
        option = "--inference-dynamic-batching-unified-memory-level"
        what = f"a cache in managed memory (level {level}), which this engine does not have"
        yield Problem("inference-unified-memory", what, option, "leave it out")
    backend = options.inference_dynamic_batching_sampling_backend
    if backend != "torch":
        option = "--inference-dynamic-batching-sampling-backend"
        what = f"tokens drawn by {backend}, which would not be those of a seed"
        yield Problem("inference-sampling-backend", what, option, "use torch")
