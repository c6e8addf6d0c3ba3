"""Inference with graphs. Names and meaning are those of Megatron-LM's options."""

from __future__ import annotations

from dataclasses import dataclass

from graphstep.config.choices import SamplingBackend, SizingDistribution
from graphstep.config.section import Section


@dataclass(frozen=True, kw_only=True, slots=True)
class InferenceConfig(Section):
    """Number and spacing of the shapes that inference graphs are captured for, and the batches they serve.

    Raises:
        ConfigError: values out of range or that contradict each other; all problems at once.
    """

    inference_dynamic_batching: bool = False
    """Requests join and leave a running batch."""
    inference_dynamic_batching_num_cuda_graphs: int = 16
    """Largest number of token counts that graphs are captured for; -1: chosen automatically."""
    inference_dynamic_batching_cuda_graph_mixed_prefill_count: int = 16
    """Prefill requests in a shape that mixes prefill and decode; 0 or less: decode only."""
    inference_dynamic_batching_cuda_graph_sizing_distribution: SizingDistribution = "exponential"
    """Token counts are halved from one to the next, or equally far apart."""
    decode_only_cuda_graphs: bool = False
    """No graphs for steps with prefill."""
    inference_cuda_graph_all_prefills: bool = False
    """Graphs for all prefill steps, up to the largest number of tokens."""
    inference_cuda_graph_max_tokens: int = 512
    """Most tokens of a shape that mixes prefill and decode; never below what decoding needs."""
    inference_dynamic_batching_max_requests: int | None = None
    """Most requests of a batch; None: from the memory there is."""
    inference_dynamic_batching_max_tokens: int | None = None
    """Most tokens of a step; None: chosen automatically."""
    inference_dynamic_batching_block_size: int = 256
    """Tokens of a block of the key-value cache."""
    inference_dynamic_batching_buffer_size_gb: float = 40.0
    """Memory of the key-value cache in GB."""
    inference_dynamic_batching_unified_memory_level: int = 0
    """1: the key-value cache in managed memory, whose addresses never change."""
    inference_dynamic_batching_sampling_backend: SamplingBackend = "torch"
    """Who draws tokens; ``flashinfer`` is never captured."""
    num_speculative_tokens: int = 0
    """Tokens that are guessed ahead in each decode step."""
    inference_batch_times_seqlen_threshold: int = -1
    """Split batches larger than this into microbatches of the pipeline; -1: never."""
    enable_chunked_prefill: bool = False
    """Split long prompts over several steps."""
    batch_invariant_mode: bool = False
    """Results that do not depend on the other requests of a batch; token counts are multiples of 64."""

    @property
    def use_cuda_graphs_for_non_decode_steps(self) -> bool:
        """Are there graphs for steps with prefill?"""
        return not self.decode_only_cuda_graphs
