"""What ``graphstep train`` cannot do yet, and what has no effect in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from graphstep.config.rules.graphs import captures_by_module
from graphstep.config.rules.rule import Rule, flag_of

_NOT_YET: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "mtp_num_layers": (lambda v: v is not None, "leave it out"),
    "multi_latent_attention": (bool, "leave it out"),
    "fp16": (bool, "use --bf16, or neither"),
    "fp8_format": (
        lambda v: v is not None,
        "leave it out; or use GPTModel(config, fp8=DelayedScaling()) in a loop of your own (docs/fp8.md)",
    ),
    "fp4_format": (lambda v: v is not None, "use --bf16"),
    "optimizer": (lambda v: v != "adam", "use --optimizer adam"),
    "skip_train": (bool, "leave it out"),
    "calculate_per_token_loss": (bool, "leave it out"),
    "check_for_large_grads": (bool, "leave it out"),
    "check_for_spiky_loss": (bool, "leave it out"),
    "log_num_zeros_in_grad": (bool, "leave it out"),
    "tensor_model_parallel_size": (lambda v: v != 1, "use 1"),
    "pipeline_model_parallel_size": (lambda v: v != 1, "use 1"),
    "num_virtual_stages_per_pipeline_rank": (lambda v: v is not None and v != 1, "leave it out"),
    "context_parallel_size": (lambda v: v != 1, "use 1"),
    "expert_model_parallel_size": (lambda v: v != 1, "use 1"),
    "tensor_parallel_num_weight_shards": (lambda v: v != 1, "use 1"),
    "hybrid_context_parallel": (bool, "leave it out"),
    "use_precision_aware_optimizer": (bool, "leave it out"),
    "use_megatron_fsdp": (bool, "leave it out"),
    "fake_process_group": (bool, "leave it out"),
    "recompute_granularity": (lambda v: v is not None, "leave it out"),
    "cpu_offloading_num_layers": (lambda v: v > 0, "leave it out"),
    "fine_grained_activation_offloading": (bool, "leave it out"),
    "optimizer_cpu_offload": (bool, "leave it out"),
    "moe_latent_size": (lambda v: v is not None, "leave it out"),
    "moe_expert_rank_capacity_factor": (lambda v: v is not None, "use --moe-expert-capacity-factor, or leave it out"),
    "moe_paged_stash": (bool, "leave it out"),
    "moe_router_padding_for_quantization": (bool, "leave it out"),
    "perform_rl_step": (bool, "leave it out"),
}
"""Option -> would it change the run, and what to do instead."""

_WITHOUT_EFFECT = (
    "transformer_impl",
    "cross_entropy_loss_fusion",
    "gradient_accumulation_fusion",
    "dataloader_type",
    "timing_log_level",
    "expert_tensor_parallel_size",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "use_transformer_engine_op_fuser",
    "moe_use_grouped_tensor",
    "moe_permute_fusion",
    "moe_pad_experts_for_cuda_graph_inference",
    "inference_dynamic_batching",
    "inference_dynamic_batching_num_cuda_graphs",
    "inference_dynamic_batching_cuda_graph_mixed_prefill_count",
    "inference_dynamic_batching_cuda_graph_sizing_distribution",
    "decode_only_cuda_graphs",
    "inference_cuda_graph_all_prefills",
    "inference_cuda_graph_max_tokens",
    "inference_dynamic_batching_max_requests",
    "inference_dynamic_batching_max_tokens",
    "inference_dynamic_batching_block_size",
    "inference_dynamic_batching_buffer_size_gb",
    "inference_dynamic_batching_unified_memory_level",
    "inference_dynamic_batching_sampling_backend",
    "num_speculative_tokens",
    "enable_chunked_prefill",
    "batch_invariant_mode",
)
"""Options that change nothing in a training run on one device."""


def _not_yet(name: str, is_asked_for: Callable[[Any], bool], fix: str) -> Rule:
    return Rule(
        code=f"not-available-{name.replace('_', '-')}",
        fields=(name,),
        broken=lambda options: bool(is_asked_for(getattr(options, name))),
        what=f"{flag_of(name)} is not available yet in graphstep train",
        fix=fix,
        for_training=True,
    )


def _idle_in_train(name: str) -> Rule:
    return Rule(
        code=f"{name.replace('_', '-')}-unused-in-train",
        fields=(name, f"given_{name}"),
        broken=lambda options: bool(getattr(options, f"given_{name}")),
        what=f"{flag_of(name)} has no effect yet in graphstep train",
        fix="leave it out",
        is_notice=True,
        for_training=True,
    )


AVAILABILITY_RULES: tuple[Rule, ...] = (
    Rule(
        code="not-available-retain",
        fields=("cuda_graph_impl", "cuda_graph_retain_backward_graph"),
        broken=lambda o: o.cuda_graph_retain_backward_graph and captures_by_module(o),
        what="--cuda-graph-retain-backward-graph is not available yet in graphstep train",
        fix="leave it out",
        for_training=True,
    ),
    Rule(
        code="not-available-ranks",
        fields=("world_size",),
        broken=lambda o: o.world_size > 1,
        what="training on {world_size} ranks is not available yet in graphstep train",
        fix="launch one process without torchrun, or unset WORLD_SIZE",
        for_training=True,
    ),
    *(_not_yet(name, is_asked_for, fix) for name, (is_asked_for, fix) in _NOT_YET.items()),
    *(_idle_in_train(name) for name in _WITHOUT_EFFECT),
    Rule(
        code="pool-always-single",
        fields=("cuda_graph_impl", "cuda_graph_use_single_mempool"),
        broken=lambda o: not o.cuda_graph_use_single_mempool and o.cuda_graph_impl == "full_iteration",
        what="--no-cuda-graph-use-single-mempool has no effect yet in graphstep train: all graphs share one pool",
        fix="leave it out",
        is_notice=True,
        for_training=True,
    ),
    Rule(
        code="inference-scope-without-effect",
        fields=("inference_cuda_graph_scope", "given_inference_cuda_graph_scope"),
        broken=lambda o: o.given_inference_cuda_graph_scope and o.inference_cuda_graph_scope != "none",
        what="--inference-cuda-graph-scope has no effect in graphstep train: it makes no inference graphs",
        fix="leave it out",
        is_notice=True,
        for_training=True,
    ),
)
