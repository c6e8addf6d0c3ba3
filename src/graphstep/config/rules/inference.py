"""Rules about inference and reinforcement learning."""

from __future__ import annotations

from graphstep.config.rules.graphs import has_experts
from graphstep.config.rules.rule import Rule, at_least, idle, in_range, optional, words_of

_NUM_GRAPHS = "inference_dynamic_batching_num_cuda_graphs"
_KV_LEVEL = "inference_dynamic_batching_unified_memory_level"
_RL_LEVEL = "rl_inference_model_unified_memory_level"
_RL = "perform_rl_step"
_KV_MODE = "rl_kv_cache_management_mode"

INFERENCE_RULES: tuple[Rule, ...] = (
    *words_of(
        "inference_dynamic_batching_cuda_graph_sizing_distribution",
        "inference_dynamic_batching_sampling_backend",
        _KV_MODE,
    ),
    in_range(_KV_LEVEL, lambda v: v in (0, 1), "0 or 1", "use 1 for managed memory"),
    in_range(_RL_LEVEL, lambda v: v in (0, 1), "0 or 1", "use 1 for managed memory"),
    optional("inference_dynamic_batching_max_requests", lambda v: v >= 1, "at least 1", "leave it out"),
    optional("inference_dynamic_batching_max_tokens", lambda v: v >= 1, "at least 1", "leave it out"),
    at_least(1, "inference_dynamic_batching_block_size", "use 256"),
    in_range("inference_dynamic_batching_buffer_size_gb", lambda v: v > 0, "above 0", "use 40"),
    at_least(0, "num_speculative_tokens", "use 0 for none"),
    Rule(
        code="inference-graph-count",
        fields=("cuda_graph_impl", _NUM_GRAPHS),
        broken=lambda o: (
            o.cuda_graph_impl == "local"
            and o.inference_dynamic_batching_num_cuda_graphs < 1
            and o.inference_dynamic_batching_num_cuda_graphs != -1
        ),
        what="local captures a positive number of inference graphs, or with -1 an automatic one; got "
        "{inference_dynamic_batching_num_cuda_graphs}",
        fix="use --inference-dynamic-batching-num-cuda-graphs 16, or -1",
    ),
    Rule(
        code="inference-pipeline-graphs",
        fields=("inference_batch_times_seqlen_threshold", "cuda_graph_impl"),
        broken=lambda o: o.inference_batch_times_seqlen_threshold > -1 and o.cuda_graph_impl != "none",
        what="inference that splits a batch into microbatches of the pipeline has no fixed shapes to capture",
        fix="use --cuda-graph-impl none, or leave --inference-batch-times-seqlen-threshold out",
    ),
    Rule(
        code="inference-pipeline-stages",
        fields=("inference_batch_times_seqlen_threshold", "pipeline_model_parallel_size"),
        broken=lambda o: o.inference_batch_times_seqlen_threshold > -1 and o.pipeline_model_parallel_size == 1,
        what="--inference-batch-times-seqlen-threshold splits batches among the stages of a pipeline, and there is one",
        fix="add --pipeline-model-parallel-size 2, or leave it out",
    ),
    Rule(
        code="block-scope-fp8",
        fields=("inference_cuda_graph_scope", "fp8_format", "fp8_recipe", "transformer_impl"),
        broken=lambda o: (
            o.inference_cuda_graph_scope == "block"
            and o.fp8_format is not None
            and (o.transformer_impl != "inference_optimized" or o.fp8_recipe != "mxfp8")
        ),
        what="one inference graph for the whole model in fp8 needs inference_optimized layers and the recipe mxfp8",
        fix="use --inference-cuda-graph-scope layer, or add --transformer-impl inference_optimized --fp8-recipe mxfp8",
    ),
    Rule(
        code="speculation-needs-mtp",
        fields=("num_speculative_tokens", "mtp_num_layers"),
        broken=lambda o: o.num_speculative_tokens > 0 and o.num_speculative_tokens > (o.mtp_num_layers or 0),
        what="{num_speculative_tokens} tokens are guessed ahead by as many layers of multi-token prediction",
        fix="add --mtp-num-layers, or lower --num-speculative-tokens",
    ),
    Rule(
        code="batch-invariant-padding",
        fields=("batch_invariant_mode", "moe_pad_experts_for_cuda_graph_inference"),
        broken=lambda o: o.batch_invariant_mode and o.moe_pad_experts_for_cuda_graph_inference,
        what="with padded experts, results depend on the other requests of a batch",
        fix="keep --batch-invariant-mode or --moe-pad-experts-for-cuda-graph-inference",
    ),
    Rule(
        code="inference-expert-padding",
        fields=(
            "cuda_graph_impl",
            "expert_model_parallel_size",
            "num_experts",
            "transformer_impl",
            "moe_pad_experts_for_cuda_graph_inference",
        ),
        broken=lambda o: (
            o.cuda_graph_impl == "local"
            and has_experts(o)
            and o.expert_model_parallel_size > 1
            and o.transformer_impl != "inference_optimized"
            and not o.moe_pad_experts_for_cuda_graph_inference
        ),
        what="inference graphs of experts on several ranks need padded experts: there will be none",
        fix="add --moe-pad-experts-for-cuda-graph-inference to run inference with graphs",
        is_notice=True,
    ),
    Rule(
        code="inference-max-tokens-clamped",
        fields=("inference_cuda_graph_max_tokens", "cuda_graph_impl"),
        broken=lambda o: o.cuda_graph_impl == "local" and o.inference_cuda_graph_max_tokens < 1,
        what="{inference_cuda_graph_max_tokens} tokens are fewer than decoding needs: its number is used",
        fix="leave --inference-cuda-graph-max-tokens out",
        is_notice=True,
    ),
    *idle(
        (
            _NUM_GRAPHS,
            "inference_dynamic_batching_cuda_graph_mixed_prefill_count",
            "inference_dynamic_batching_cuda_graph_sizing_distribution",
            "decode_only_cuda_graphs",
            "inference_cuda_graph_all_prefills",
        ),
        ("inference_cuda_graph_scope",),
        lambda o: o.inference_cuda_graph_scope == "none",
        "no inference graphs are captured",
        "add --cuda-graph-impl local, or leave it out",
    ),
    *idle(
        ("inference_cuda_graph_max_tokens",),
        ("inference_cuda_graph_scope", "inference_cuda_graph_all_prefills", "decode_only_cuda_graphs"),
        lambda o: (
            o.inference_cuda_graph_scope == "none" or o.inference_cuda_graph_all_prefills or o.decode_only_cuda_graphs
        ),
        "no graphs with prefill are bounded by it",
        "leave it out",
    ),
    Rule(
        code="decode-only-and-all-prefills",
        fields=("decode_only_cuda_graphs", "inference_cuda_graph_all_prefills", "inference_cuda_graph_scope"),
        broken=lambda o: (
            o.inference_cuda_graph_scope != "none" and o.decode_only_cuda_graphs and o.inference_cuda_graph_all_prefills
        ),
        what="--inference-cuda-graph-all-prefills has no effect with --decode-only-cuda-graphs",
        fix="leave one of the two out",
        is_notice=True,
    ),
    Rule(
        code="rl-training-graphs",
        fields=(_RL, "rl_training_cuda_graphs", "cuda_graph_impl"),
        broken=lambda o: o.perform_rl_step and o.rl_training_cuda_graphs and o.cuda_graph_impl == "none",
        what="--rl-training-cuda-graphs asks for graphs in training, and no graphs are captured",
        fix="add --cuda-graph-impl local, or leave it out",
    ),
    Rule(
        code="rl-persist-graphs",
        fields=(_RL, "rl_persist_cuda_graphs", "cuda_graph_impl"),
        broken=lambda o: o.perform_rl_step and o.rl_persist_cuda_graphs and o.cuda_graph_impl == "none",
        what="--rl-persist-cuda-graphs keeps inference graphs, and no graphs are captured",
        fix="add --cuda-graph-impl local, or leave it out",
    ),
    Rule(
        code="rl-offload-needs-persist",
        fields=(_RL, _KV_MODE, "rl_persist_cuda_graphs"),
        broken=lambda o: (
            o.perform_rl_step and o.rl_kv_cache_management_mode == "offload" and not o.rl_persist_cuda_graphs
        ),
        what="capturing inference graphs again overwrites the key-value cache that offload kept",
        fix="add --rl-persist-cuda-graphs, or use --rl-kv-cache-management-mode recompute",
    ),
    Rule(
        code="rl-offload-managed",
        fields=(_RL, _KV_MODE, _KV_LEVEL),
        broken=lambda o: (
            o.perform_rl_step
            and o.rl_kv_cache_management_mode == "offload"
            and o.inference_dynamic_batching_unified_memory_level > 0
        ),
        what="a key-value cache in managed memory moves by itself: it cannot be offloaded",
        fix="use --inference-dynamic-batching-unified-memory-level 0, or another --rl-kv-cache-management-mode",
    ),
    Rule(
        code="rl-persist-addresses",
        fields=(_RL, "rl_persist_cuda_graphs", _KV_MODE, _KV_LEVEL, "torch_memory_saver"),
        broken=lambda o: (
            o.perform_rl_step
            and o.rl_persist_cuda_graphs
            and o.rl_kv_cache_management_mode != "persist"
            and o.inference_dynamic_batching_unified_memory_level == 0
            and not o.torch_memory_saver
        ),
        what="graphs that are kept need a key-value cache that comes back at the same addresses",
        fix="use --rl-kv-cache-management-mode persist, add --inference-dynamic-batching-unified-memory-level 1, or "
        "install torch_memory_saver",
    ),
    Rule(
        code="rl-weights-addresses",
        fields=(_RL, "rl_offload_inference_model_weights_when_idle", _RL_LEVEL, "torch_memory_saver"),
        broken=lambda o: (
            o.perform_rl_step
            and o.rl_offload_inference_model_weights_when_idle
            and o.rl_inference_model_unified_memory_level != 1
            and not o.torch_memory_saver
        ),
        what="weights that move to the CPU need to come back at the same addresses",
        fix="add --rl-inference-model-unified-memory-level 1, or install torch_memory_saver",
    ),
    Rule(
        code="rl-offload-optimizer",
        fields=(_RL, "rl_offload_optimizer_during_inference", "rl_training_cuda_graphs"),
        broken=lambda o: o.perform_rl_step and o.rl_offload_optimizer_during_inference and o.rl_training_cuda_graphs,
        what="gradient buffers stay on the device: training graphs hold their addresses",
        fix="nothing to do; without --rl-training-cuda-graphs they move as well",
        is_notice=True,
    ),
    Rule(
        code="rl-no-inference-graphs",
        fields=(_RL, "rl_persist_cuda_graphs", "rl_training_cuda_graphs", "cuda_graph_impl"),
        broken=lambda o: (
            o.perform_rl_step
            and bool(o.rl_persist_cuda_graphs or o.rl_training_cuda_graphs)
            and o.cuda_graph_impl in ("transformer_engine", "full_iteration")
        ),
        what="{cuda_graph_impl} makes no inference graphs: rollouts run eagerly, and there is nothing to persist",
        fix="use --cuda-graph-impl local to capture rollouts as well",
        is_notice=True,
    ),
    *idle(
        (
            "rl_training_cuda_graphs",
            "rl_persist_cuda_graphs",
            _KV_MODE,
            _RL_LEVEL,
            "rl_offload_inference_model_weights_when_idle",
            "rl_offload_optimizer_during_inference",
        ),
        (_RL,),
        lambda o: not o.perform_rl_step,
        "this is no run with reinforcement learning",
        "add --perform-rl-step, or leave it out",
    ),
)
