"""How ranks share the work. Names and meaning are those of Megatron-LM's options."""

from __future__ import annotations

from dataclasses import dataclass

from graphstep.config.section import Section


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig(Section):
    """Sizes of the groups of ranks, and what overlaps with what.

    Raises:
        ConfigError: sizes below 1 or that do not fit each other; all problems at once.
    """

    tensor_model_parallel_size: int = 1
    """Ranks that share each matrix."""
    pipeline_model_parallel_size: int = 1
    """Stages of the pipeline."""
    num_virtual_stages_per_pipeline_rank: int | None = None
    """Model chunks of a stage, for the interleaved schedule."""
    context_parallel_size: int = 1
    """Ranks that share a sequence."""
    expert_model_parallel_size: int = 1
    """Ranks that share the experts."""
    expert_tensor_parallel_size: int | None = None
    """Ranks that share each matrix of an expert. None: ``tensor_model_parallel_size``."""
    tensor_parallel_num_weight_shards: int = 1
    """Ranks that keep a share of each weight and gather it when it is needed (generalised tensor parallelism)."""
    sequence_parallel: bool = False
    """Split the tokens of norms and dropout among the ranks of a tensor group."""
    hybrid_context_parallel: bool = False
    """Choose the context-parallel size by the length of each sequence."""
    use_distributed_optimizer: bool = False
    """Share the optimizer state among data-parallel ranks."""
    use_precision_aware_optimizer: bool = False
    """Optimizer state in a number format of its own."""
    use_megatron_fsdp: bool = False
    """Share parameters, gradients and optimizer state among data-parallel ranks."""
    megatron_fsdp_cuda_graph_mode: bool = False
    """Make that sharing fit graphs; always on where both are used."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward goes on."""
    overlap_param_gather: bool = False
    """Gather parameters while the forward goes on."""
    overlap_moe_expert_parallel_comm: bool = False
    """Run the backward of one microbatch beside the forward of another to hide the exchange of tokens."""
    delay_wgrad_compute: bool = False
    """Compute weight gradients apart from and after input gradients."""
    fake_process_group: bool = False
    """Pretend that the other ranks exist; for measurements."""
