"""Rules about ranks, and about the environment they run in."""

from __future__ import annotations

from typing import Any

from graphstep.config.rules.graphs import captures_by_module, names_module
from graphstep.config.rules.rule import Rule, at_least, no_effect, optional

_BLACKWELL = 10
_OVERLAP = "overlap_moe_expert_parallel_comm"
_FP_RANKS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def _experts_per_rank(options: Any) -> int:
    tensor = options.expert_tensor_parallel_size or options.tensor_model_parallel_size
    return int(tensor * options.expert_model_parallel_size * options.pipeline_model_parallel_size)


def _delays_captured_wgrad(options: Any) -> bool:
    """Are weight gradients that a graph computes delayed, while gradients are reduced beside the backward?"""
    shared = options.moe_shared_expert_intermediate_size is not None and not options.moe_shared_expert_overlap
    captured = "attn" in options.cuda_graph_modules or ("moe_router" in options.cuda_graph_modules and shared)
    return bool(options.delay_wgrad_compute and options.overlap_grad_reduce and captured)


def _has_few_connections(options: Any) -> bool:
    word = options.cuda_device_max_connections.strip()
    return not (word.isascii() and word.isdigit() and int(word[:6]) >= 16)


def _wants_one_connection(options: Any) -> bool:
    shares = options.tensor_model_parallel_size > 1 or options.context_parallel_size > 1
    return shares and not options.use_megatron_fsdp and options.cuda_device_max_connections.strip() != "1"


PARALLEL_RULES: tuple[Rule, ...] = (
    *(at_least(1, name, "use 1 to share nothing") for name in _FP_RANKS),
    at_least(1, "expert_model_parallel_size", "use 1 to share nothing"),
    at_least(1, "tensor_parallel_num_weight_shards", "use 1 to share nothing"),
    optional("expert_tensor_parallel_size", lambda v: v >= 1, "at least 1", "leave it out"),
    optional("num_virtual_stages_per_pipeline_rank", lambda v: v >= 1, "at least 1", "leave it out"),
    Rule(
        code="ranks-divide",
        fields=("world_size", *_FP_RANKS, "tensor_parallel_num_weight_shards", "ranks_of_a_replica"),
        broken=lambda o: o.world_size % o.ranks_of_a_replica != 0,
        what="a model that is shared by {ranks_of_a_replica} ranks needs a multiple of them, and WORLD_SIZE is "
        "{world_size}",
        fix="launch a multiple of {ranks_of_a_replica} ranks (torchrun sets WORLD_SIZE; to look at a line only, set it "
        "yourself), or lower the sizes",
    ),
    Rule(
        code="expert-ranks-divide",
        fields=(
            "world_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
        ),
        broken=lambda o: o.expert_model_parallel_size > 1 and o.world_size % _experts_per_rank(o) != 0,
        what="the {expert_model_parallel_size} ranks that share the experts, times those of an expert and the stages, "
        "do not divide WORLD_SIZE, which is {world_size}",
        fix="launch more ranks (torchrun sets WORLD_SIZE; to look at a line only, set it yourself), or lower "
        "--expert-model-parallel-size",
    ),
    Rule(
        code="ranks-batches-divide",
        fields=("global_batch_size", "micro_batch_size", "data_parallel_size"),
        broken=lambda o: (
            o.global_batch_size % o.micro_batch_size == 0
            and o.global_batch_size % (o.micro_batch_size * o.data_parallel_size) != 0
        ),
        what="global batch size {global_batch_size} is no multiple of micro batch size {micro_batch_size} times "
        "{data_parallel_size} copies of the model",
        fix="choose a multiple, or leave --global-batch-size out",
    ),
    Rule(
        code="stages-divide-layers",
        fields=(
            "pipeline_model_parallel_size",
            "num_virtual_stages_per_pipeline_rank",
            "num_layers",
            "hybrid_layer_pattern",
        ),
        broken=lambda o: (
            o.hybrid_layer_pattern is None
            and o.num_layers % (o.pipeline_model_parallel_size * (o.num_virtual_stages_per_pipeline_rank or 1)) != 0
        ),
        what="{num_layers} layers cannot be split evenly among {pipeline_model_parallel_size} stages and their chunks",
        fix="choose a multiple for --num-layers",
    ),
    Rule(
        code="ranks-divide-heads",
        fields=("tensor_model_parallel_size", "num_attention_heads"),
        broken=lambda o: o.num_attention_heads % o.tensor_model_parallel_size != 0,
        what="{num_attention_heads} attention heads cannot be split evenly among {tensor_model_parallel_size} ranks",
        fix="make --num-attention-heads a multiple of --tensor-model-parallel-size",
    ),
    Rule(
        code="ranks-connections",
        fields=(
            "tensor_model_parallel_size",
            "context_parallel_size",
            "use_megatron_fsdp",
            "cuda_device_max_connections",
            "gpu_arch",
        ),
        broken=lambda o: o.gpu_arch is not None and o.gpu_arch < _BLACKWELL and _wants_one_connection(o),
        what="before Blackwell, ranks that share matrices or sequences overlap their exchanges with one hardware queue "
        "only",
        fix="set CUDA_DEVICE_MAX_CONNECTIONS=1",
    ),
    Rule(
        code="ranks-connections-unknown",
        fields=(
            "tensor_model_parallel_size",
            "context_parallel_size",
            "use_megatron_fsdp",
            "cuda_device_max_connections",
            "gpu_arch",
        ),
        broken=lambda o: o.gpu_arch is None and _wants_one_connection(o),
        what="before Blackwell, ranks that share matrices or sequences overlap their exchanges with one hardware queue "
        "only",
        fix="set CUDA_DEVICE_MAX_CONNECTIONS=1 on such devices",
        is_notice=True,
    ),
    Rule(
        code="expert-ranks-need-experts",
        fields=("expert_model_parallel_size", "num_experts"),
        broken=lambda o: (
            o.expert_model_parallel_size > 1
            and (o.num_experts is None or o.num_experts % o.expert_model_parallel_size != 0)
        ),
        what="{expert_model_parallel_size} ranks cannot share {num_experts} experts evenly",
        fix="make --num-experts a multiple of --expert-model-parallel-size",
    ),
    Rule(
        code="sequence-parallel-needs-tensor",
        fields=("sequence_parallel", "tensor_model_parallel_size"),
        broken=lambda o: o.sequence_parallel and o.tensor_model_parallel_size == 1,
        what="--sequence-parallel has no effect: there is one rank in a tensor group",
        fix="raise --tensor-model-parallel-size, or leave it out",
        is_notice=True,
    ),
    Rule(
        code="hybrid-context-parallel-graphs",
        fields=("hybrid_context_parallel", "cuda_graph_impl"),
        broken=lambda o: o.hybrid_context_parallel and o.cuda_graph_impl != "none",
        what="--hybrid-context-parallel changes shapes from sequence to sequence, and a graph has fixed ones",
        fix="use --cuda-graph-impl none, or --context-parallel-size instead",
    ),
    Rule(
        code="hybrid-context-parallel-loop",
        fields=(
            "hybrid_context_parallel",
            "calculate_per_token_loss",
            "dataloader_type",
            "pipeline_model_parallel_size",
            "use_megatron_fsdp",
        ),
        broken=lambda o: (
            o.hybrid_context_parallel
            and (
                not o.calculate_per_token_loss
                or o.dataloader_type != "single"
                or o.pipeline_model_parallel_size > 1
                or o.use_megatron_fsdp
            )
        ),
        what="--hybrid-context-parallel needs the loss per token, data read once through, and neither stages nor FSDP",
        fix="add --calculate-per-token-loss --dataloader-type single",
    ),
    Rule(
        code="precision-aware-optimizer",
        fields=("use_precision_aware_optimizer", "use_distributed_optimizer"),
        broken=lambda o: o.use_precision_aware_optimizer and not o.use_distributed_optimizer,
        what="--use-precision-aware-optimizer is a form of the distributed optimizer",
        fix="add --use-distributed-optimizer",
    ),
    Rule(
        code="overlap-needs-expert-ranks",
        fields=(_OVERLAP, "expert_model_parallel_size", "moe_token_dispatcher_type"),
        broken=lambda o: (
            o.overlap_moe_expert_parallel_comm
            and (o.expert_model_parallel_size == 1 or o.moe_token_dispatcher_type not in ("alltoall", "flex"))
        ),
        what="--overlap-moe-expert-parallel-comm hides the exchange of tokens between ranks, and there is none",
        fix="use --expert-model-parallel-size 2 or more with --moe-token-dispatcher-type alltoall or flex, or leave "
        "--overlap-moe-expert-parallel-comm out",
    ),
    Rule(
        code="overlap-needs-half",
        fields=(_OVERLAP, "bf16", "fp16"),
        broken=lambda o: o.overlap_moe_expert_parallel_comm and not o.bf16 and not o.fp16,
        what="--overlap-moe-expert-parallel-comm runs in bf16 or fp16 only",
        fix="add --bf16",
    ),
    Rule(
        code="overlap-recompute",
        fields=(
            _OVERLAP,
            "recompute_granularity",
            "recompute_method",
            "recompute_num_layers",
            "recompute_modules",
        ),
        broken=lambda o: (
            o.overlap_moe_expert_parallel_comm
            and (
                o.recompute_granularity == "full"
                or o.recompute_method is not None
                or o.recompute_num_layers is not None
                or "moe" in (o.recompute_modules or ())
            )
        ),
        what="--overlap-moe-expert-parallel-comm cannot recompute whole layers or experts",
        fix="recompute other parts with --recompute-granularity selective, or nothing",
    ),
    Rule(
        code="overlap-shared-expert",
        fields=(_OVERLAP, "moe_shared_expert_overlap"),
        broken=lambda o: o.overlap_moe_expert_parallel_comm and o.moe_shared_expert_overlap,
        what="the exchange of tokens is hidden behind another microbatch and behind the shared expert at once",
        fix="keep one of --overlap-moe-expert-parallel-comm and --moe-shared-expert-overlap",
    ),
    Rule(
        code="overlap-mtp",
        fields=(_OVERLAP, "mtp_num_layers"),
        broken=lambda o: o.overlap_moe_expert_parallel_comm and (o.mtp_num_layers or 0) > 1,
        what="--overlap-moe-expert-parallel-comm goes with one layer of multi-token prediction at most",
        fix="use --mtp-num-layers 1, or leave one of the two out",
    ),
    Rule(
        code="overlap-stages",
        fields=(_OVERLAP, "pipeline_model_parallel_size", "num_virtual_stages_per_pipeline_rank"),
        broken=lambda o: (
            o.overlap_moe_expert_parallel_comm
            and o.pipeline_model_parallel_size > 1
            and o.num_virtual_stages_per_pipeline_rank is None
        ),
        what="--overlap-moe-expert-parallel-comm in a pipeline needs the interleaved schedule",
        fix="add --num-virtual-stages-per-pipeline-rank",
    ),
    Rule(
        code="overlap-modules",
        fields=(_OVERLAP, "cuda_graph_impl", "cuda_graph_modules"),
        broken=lambda o: (
            o.overlap_moe_expert_parallel_comm
            and o.cuda_graph_impl == "transformer_engine"
            and names_module(o, "moe", "mlp")
        ),
        what="with --overlap-moe-expert-parallel-comm, transformer_engine cannot capture moe and mlp: the schedule "
        "runs their parts one by one",
        fix="name attn, moe_router and moe_preprocess only",
    ),
    Rule(
        code="delayed-wgrad-needs-overlap",
        fields=("delay_wgrad_compute", _OVERLAP),
        broken=lambda o: o.delay_wgrad_compute and not o.overlap_moe_expert_parallel_comm,
        what="--delay-wgrad-compute moves weight gradients into the overlapped exchange of tokens, and there is none",
        fix="add --overlap-moe-expert-parallel-comm, or leave --delay-wgrad-compute out",
    ),
    Rule(
        code="delayed-wgrad-kernels",
        fields=("delay_wgrad_compute", "transformer_impl"),
        broken=lambda o: o.delay_wgrad_compute and o.transformer_impl != "transformer_engine",
        what="--delay-wgrad-compute needs --transformer-impl transformer_engine",
        fix="add --transformer-impl transformer_engine",
    ),
    Rule(
        code="delayed-wgrad-version",
        fields=("delay_wgrad_compute", "cuda_graph_impl", "te_version"),
        broken=lambda o: (
            o.delay_wgrad_compute and o.cuda_graph_impl == "transformer_engine" and () < o.te_version < (2, 10)
        ),
        what="--delay-wgrad-compute with graphs of transformer_engine needs Transformer Engine 2.10 or newer",
        fix="update it, or leave --delay-wgrad-compute out",
    ),
    Rule(
        code="delayed-wgrad-graph-version",
        fields=(
            "delay_wgrad_compute",
            "overlap_grad_reduce",
            "cuda_graph_modules",
            "moe_shared_expert_intermediate_size",
            "moe_shared_expert_overlap",
            "te_version",
        ),
        broken=lambda o: _delays_captured_wgrad(o) and () < o.te_version < (2, 12),
        what="delayed weight gradients inside a graph need Transformer Engine 2.12 where gradients are reduced",
        fix="update it, or leave --overlap-grad-reduce out",
    ),
    Rule(
        code="delayed-wgrad-fusion",
        fields=(
            "delay_wgrad_compute",
            "overlap_grad_reduce",
            "gradient_accumulation_fusion",
            "cuda_graph_modules",
            "moe_shared_expert_intermediate_size",
            "moe_shared_expert_overlap",
        ),
        broken=lambda o: _delays_captured_wgrad(o) and not o.gradient_accumulation_fusion,
        what="delayed weight gradients inside a graph need fixed addresses, which only the fused accumulation has",
        fix="leave --no-gradient-accumulation-fusion out",
    ),
    Rule(
        code="delayed-wgrad-bias",
        fields=(
            "delay_wgrad_compute",
            "overlap_grad_reduce",
            "cuda_graph_modules",
            "add_bias_linear",
            "add_qkv_bias",
            "moe_shared_expert_intermediate_size",
            "moe_shared_expert_overlap",
        ),
        broken=lambda o: (
            _delays_captured_wgrad(o) and "attn" in o.cuda_graph_modules and bool(o.add_bias_linear or o.add_qkv_bias)
        ),
        what="delayed weight gradients of a captured attention cannot have a bias",
        fix="add --disable-bias-linear, or leave --add-qkv-bias out",
    ),
    Rule(
        code="expandable-segments",
        fields=("cuda_graph_impl", "expandable_segments", "nccl_graph_register", "communicates_in_graphs"),
        broken=lambda o: (
            o.expandable_segments
            and o.nccl_graph_register != "0"
            and (o.cuda_graph_impl == "transformer_engine" or o.communicates_in_graphs)
        ),
        what="NCCL registers buffers of graphs at addresses that expandable segments of the allocator may unmap",
        fix="set NCCL_GRAPH_REGISTER=0, or leave expandable_segments out of PYTORCH_CUDA_ALLOC_CONF",
    ),
    Rule(
        code="weight-shards-priority",
        fields=(
            "tensor_parallel_num_weight_shards",
            "cuda_graph_impl",
            "cuda_graphs_use_node_priority",
            "gpu_arch",
        ),
        broken=lambda o: (
            o.tensor_parallel_num_weight_shards > 1
            and o.cuda_graph_impl != "none"
            and (o.gpu_arch or 0) >= _BLACKWELL
            and o.cuda_graphs_use_node_priority != "1"
        ),
        what="gathering weights inside graphs needs the priority of streams, which graphs keep only when told so",
        fix="set CUDA_GRAPHS_USE_NODE_PRIORITY=1",
    ),
    Rule(
        code="weight-shards-connections",
        fields=("tensor_parallel_num_weight_shards", "cuda_graph_impl", "cuda_device_max_connections"),
        broken=lambda o: o.tensor_parallel_num_weight_shards > 1 and captures_by_module(o) and _has_few_connections(o),
        what="gathering weights beside graphs needs many hardware queues, or it waits for the graphs",
        fix="set CUDA_DEVICE_MAX_CONNECTIONS=16 or more",
        is_notice=True,
    ),
    Rule(
        code="weight-shards-recompute",
        fields=(
            "tensor_parallel_num_weight_shards",
            "cuda_graph_impl",
            "cuda_graph_modules",
            "fp8_format",
            "fp4_format",
            "recompute_granularity",
            "recompute_modules",
            "moe_shared_expert_intermediate_size",
        ),
        broken=lambda o: (
            o.tensor_parallel_num_weight_shards > 1
            and o.cuda_graph_impl == "local"
            and names_module(o, "moe_router", "moe")
            and (o.fp8_format is not None or o.fp4_format is not None)
            and o.moe_shared_expert_intermediate_size is not None
            and o.recompute_granularity == "selective"
            and "shared_experts" in (o.recompute_modules or ())
        ),
        what="a captured shared expert with sharded fp8 or fp4 weights cannot be recomputed by local",
        fix="leave shared_experts out of --recompute-modules, or use --cuda-graph-impl full_iteration",
    ),
    no_effect(
        "freeze-gc-without-effect",
        ("cuda_graph_capture_freeze_gc",),
        lambda o: bool(o.cuda_graph_capture_freeze_gc),
        "CUDA_GRAPH_CAPTURE_FREEZE_GC has no effect: garbage collection always waits while a capture runs",
        "unset it",
    ),
)
