"""Rules about recomputation and offloading."""

from __future__ import annotations

from typing import Any

from graphstep.config.choices import OFFLOAD_MODULES, RECOMPUTE_MODULES
from graphstep.config.rules.graphs import captures_by_module, captures_whole_layers, names_module
from graphstep.config.rules.rule import Rule, at_least, idle, in_range, no_effect, optional, words_of

_EXPERT_PARTS = ("expert_fc1", "moe_act", "fused_group_mlp")
_GRAPH = ("cuda_graph_impl", "cuda_graph_modules")
_SELECTIVE = ("recompute_granularity", "recompute_modules")
_FINE = ("fine_grained_activation_offloading", "offload_modules")


def _recomputes(options: Any, *modules: str) -> bool:
    chosen = options.recompute_modules if options.recompute_modules is not None else ("core_attn",)
    return options.recompute_granularity == "selective" and any(module in chosen for module in modules)


def _offloads(options: Any, *modules: str) -> bool:
    return options.fine_grained_activation_offloading and any(m in options.offload_modules for m in modules)


MEMORY_RULES: tuple[Rule, ...] = (
    *words_of("recompute_granularity", "recompute_method"),
    optional("recompute_num_layers", lambda v: v >= 1, "at least 1", "leave it out"),
    in_range("cpu_offloading_num_layers", lambda v: v >= 0, "at least 0", "use 0, or leave it out, to keep all layers"),
    optional(
        "fine_grained_offloading_max_inflight_offloads", lambda v: v >= 0, "at least 0", "leave it out for any number"
    ),
    in_range("activation_offload_fraction", lambda v: 0 <= v <= 1, "in [0, 1]", "use 1 for all layers"),
    at_least(0, "min_offloaded_tensor_size", "use 0 for all tensors"),
    Rule(
        code="recompute-full-incomplete",
        fields=("recompute_granularity", "recompute_method", "recompute_num_layers"),
        broken=lambda o: (
            o.recompute_granularity == "full" and (o.recompute_method is None or o.recompute_num_layers is None)
        ),
        what="--recompute-granularity full needs to know which layers to recompute, and how many at a time",
        fix="add --recompute-method uniform --recompute-num-layers 1",
    ),
    Rule(
        code="recompute-selective-method",
        fields=("recompute_granularity", "recompute_method", "recompute_num_layers"),
        broken=lambda o: (
            o.recompute_granularity == "selective"
            and (o.recompute_method is not None or o.recompute_num_layers is not None)
        ),
        what="--recompute-method and --recompute-num-layers choose whole layers, and selective recomputes parts",
        fix="leave them out, or use --recompute-granularity full",
    ),
    *idle(
        ("recompute_method", "recompute_num_layers"),
        ("recompute_granularity",),
        lambda o: o.recompute_granularity is None,
        "nothing is recomputed",
        "add --recompute-granularity full, or leave it out",
    ),
    *idle(
        ("recompute_modules",),
        ("recompute_granularity",),
        lambda o: o.recompute_granularity != "selective",
        "no named parts are recomputed",
        "add --recompute-granularity selective, or leave it out",
    ),
    Rule(
        code="recompute-modules-unknown",
        fields=(*_SELECTIVE, "unknown_recompute_modules"),
        broken=lambda o: o.recompute_granularity == "selective" and bool(o.unknown_recompute_modules),
        what="--recompute-modules knows no {unknown_recompute_modules}",
        fix="use some of " + ", ".join(RECOMPUTE_MODULES),
    ),
    Rule(
        code="recompute-moe-act",
        fields=(*_SELECTIVE, "moe_grouped_gemm"),
        broken=lambda o: _recomputes(o, "moe_act") and not o.moe_grouped_gemm,
        what="moe_act can be recomputed only where all experts are one matrix multiplication",
        fix="add --moe-grouped-gemm, or leave moe_act out of --recompute-modules",
    ),
    Rule(
        code="recompute-mla",
        fields=(*_SELECTIVE, "multi_latent_attention"),
        broken=lambda o: _recomputes(o, "mla_up_proj") and not o.multi_latent_attention,
        what="mla_up_proj is a part of multi-latent attention, and this model has none",
        fix="add --multi-latent-attention, or leave mla_up_proj out of --recompute-modules",
    ),
    Rule(
        code="recompute-missing-layers",
        fields=_SELECTIVE,
        broken=lambda o: _recomputes(o, "mhc", "gdn_norm_out", "gdp_in_proj", "gdp_qkv"),
        what="mhc, gdn_norm_out, gdp_in_proj and gdp_qkv are parts of layers that this model has none of",
        fix="leave them out of --recompute-modules",
    ),
    Rule(
        code="recompute-shared-experts",
        fields=(*_SELECTIVE, "moe_shared_expert_intermediate_size", "moe_shared_expert_overlap"),
        broken=lambda o: (
            _recomputes(o, "shared_experts")
            and o.moe_shared_expert_intermediate_size is not None
            and o.moe_shared_expert_overlap
        ),
        what="a shared expert that runs beside the exchange of tokens cannot be recomputed",
        fix="leave shared_experts out of --recompute-modules, or --moe-shared-expert-overlap out",
    ),
    Rule(
        code="recompute-delayed-scaling",
        fields=(*_SELECTIVE, "fp8_format", "fp8_recipe"),
        broken=lambda o: (
            _recomputes(o, "moe_act", "layernorm") and o.fp8_format is not None and o.fp8_recipe == "delayed"
        ),
        what="fp8 with delayed scaling cannot recompute moe_act and layernorm",
        fix="use another --fp8-recipe, or leave them out of --recompute-modules",
    ),
    Rule(
        code="recompute-full-in-graph",
        fields=("recompute_granularity", "cuda_graph_impl"),
        broken=lambda o: o.recompute_granularity == "full" and captures_by_module(o),
        what="whole layers can be recomputed inside the graph of full_iteration only: elsewhere, recomputation would "
        "cover graphs",
        fix="use --recompute-granularity selective, or --cuda-graph-impl full_iteration",
    ),
    Rule(
        code="recompute-covers-router-graph",
        fields=(*_SELECTIVE, *_GRAPH),
        broken=lambda o: (
            _recomputes(o, "moe") and o.cuda_graph_impl == "transformer_engine" and names_module(o, "moe_router")
        ),
        what="recomputing moe would cover the graph of moe_router",
        fix="leave moe out of --recompute-modules, or moe_router out of --cuda-graph-modules",
    ),
    Rule(
        code="recompute-attention-dropout",
        fields=(*_SELECTIVE, *_GRAPH, "attention_dropout"),
        broken=lambda o: (
            _recomputes(o, "core_attn")
            and o.attention_dropout != 0
            and (captures_whole_layers(o) or names_module(o, "attn"))
        ),
        what="attention that is recomputed inside a graph cannot draw random numbers: dropout would differ",
        fix="use --attention-dropout 0, or leave core_attn out of --recompute-modules",
    ),
    Rule(
        code="recompute-hidden-dropout",
        fields=(*_SELECTIVE, *_GRAPH, "hidden_dropout"),
        broken=lambda o: (
            o.hidden_dropout != 0
            and (
                (_recomputes(o, "mlp") and (captures_whole_layers(o) or names_module(o, "mlp")))
                or (_recomputes(o, "moe") and (captures_whole_layers(o) or names_module(o, "moe")))
            )
        ),
        what="an MLP or experts that are recomputed inside a graph cannot draw random numbers: dropout would differ",
        fix="use --hidden-dropout 0, or leave mlp and moe out of --recompute-modules",
    ),
    Rule(
        code="recompute-jitter",
        fields=(*_SELECTIVE, *_GRAPH, "moe_input_jitter_eps"),
        broken=lambda o: (
            _recomputes(o, "moe")
            and o.moe_input_jitter_eps is not None
            and (captures_whole_layers(o) or names_module(o, "moe"))
        ),
        what="experts that are recomputed inside a graph cannot draw random numbers: the jitter would differ",
        fix="leave --moe-input-jitter-eps out, or moe out of --recompute-modules",
    ),
    Rule(
        code="recompute-router-norm",
        fields=(
            *_SELECTIVE,
            *_GRAPH,
            "moe_shared_expert_overlap",
            "moe_token_dispatcher_type",
            "moe_latent_size",
        ),
        broken=lambda o: (
            _recomputes(o, "layernorm")
            and o.cuda_graph_impl == "transformer_engine"
            and names_module(o, "moe_router")
            and (
                o.moe_shared_expert_overlap
                or "moe_preprocess" not in o.cuda_graph_modules
                or (o.moe_token_dispatcher_type != "alltoall" and o.moe_latent_size is None)
            )
        ),
        what="the norm in front of the router is not recomputed: its output is a static output of a graph, which "
        "cannot be freed",
        fix="nothing to do; naming moe_preprocess with the alltoall dispatcher lets it be recomputed",
        is_notice=True,
    ),
    Rule(
        code="offload-too-many-layers",
        fields=("cpu_offloading_num_layers", "num_layers"),
        broken=lambda o: o.cpu_offloading_num_layers >= o.num_layers,
        what="{cpu_offloading_num_layers} of {num_layers} layers cannot be offloaded: at least one stays",
        fix="lower --cpu-offloading-num-layers",
    ),
    Rule(
        code="offload-recompute",
        fields=("cpu_offloading_num_layers", "recompute_granularity"),
        broken=lambda o: o.cpu_offloading_num_layers > 0 and o.recompute_granularity is not None,
        what="layers cannot be offloaded and recomputed",
        fix="leave --cpu-offloading-num-layers or --recompute-granularity out",
    ),
    Rule(
        code="offload-stages",
        fields=("cpu_offloading_num_layers", "pipeline_model_parallel_size"),
        broken=lambda o: o.cpu_offloading_num_layers > 0 and o.pipeline_model_parallel_size > 1,
        what="layers of a pipeline cannot be offloaded",
        fix="leave --cpu-offloading-num-layers out, or use --pipeline-model-parallel-size 1",
    ),
    Rule(
        code="offload-in-graph",
        fields=("cpu_offloading_num_layers", "cuda_graph_impl"),
        broken=lambda o: o.cpu_offloading_num_layers > 0 and captures_by_module(o),
        what="a graph of a layer cannot have its activations and weights moved to the CPU",
        fix="leave --cpu-offloading-num-layers out, or use --cuda-graph-impl full_iteration",
    ),
    Rule(
        code="offload-both-ways",
        fields=("cpu_offloading_num_layers", "fine_grained_activation_offloading"),
        broken=lambda o: o.cpu_offloading_num_layers > 0 and o.fine_grained_activation_offloading,
        what="whole layers and named parts cannot both be offloaded",
        fix="keep --cpu-offloading-num-layers or --fine-grained-activation-offloading",
    ),
    Rule(
        code="offload-nothing",
        fields=_FINE,
        broken=lambda o: o.fine_grained_activation_offloading and len(o.offload_modules) == 0,
        what="--fine-grained-activation-offloading needs to know what to offload",
        fix="add --offload-modules with some of " + ", ".join(OFFLOAD_MODULES),
    ),
    Rule(
        code="offload-modules-unknown",
        fields=(*_FINE, "unknown_offload_modules"),
        broken=lambda o: o.fine_grained_activation_offloading and bool(o.unknown_offload_modules),
        what="--offload-modules knows no {unknown_offload_modules}",
        fix="use some of " + ", ".join(OFFLOAD_MODULES),
    ),
    Rule(
        code="offload-projection-alone",
        fields=_FINE,
        broken=lambda o: _offloads(o, "attn_proj") and not _offloads(o, "core_attn"),
        what="the input of attn_proj is the output of core_attn, which the backward of core_attn needs on the device",
        fix="add core_attn to --offload-modules",
    ),
    Rule(
        code="offload-recomputed-experts",
        fields=(*_FINE, *_SELECTIVE),
        broken=lambda o: _offloads(o, *_EXPERT_PARTS) and _recomputes(o, "moe"),
        what="parts of the experts cannot be offloaded while the experts are recomputed",
        fix="leave moe out of --recompute-modules, or the parts out of --offload-modules",
    ),
    Rule(
        code="offload-fused-experts",
        fields=(*_FINE, "use_transformer_engine_op_fuser"),
        broken=lambda o: (
            _offloads(o, "fused_group_mlp")
            and (not o.use_transformer_engine_op_fuser or _offloads(o, "expert_fc1", "moe_act"))
        ),
        what="fused_group_mlp is the whole fused MLP of the experts: it needs the fusion, and stands for its parts",
        fix="add --use-transformer-engine-op-fuser, and leave expert_fc1 and moe_act out of --offload-modules",
    ),
    Rule(
        code="offload-kernels",
        fields=("fine_grained_activation_offloading", "transformer_impl"),
        broken=lambda o: o.fine_grained_activation_offloading and o.transformer_impl != "transformer_engine",
        what="--fine-grained-activation-offloading needs --transformer-impl transformer_engine",
        fix="add --transformer-impl transformer_engine",
    ),
    Rule(
        code="offload-weights",
        fields=("fine_grained_activation_offloading", "nvte_cpu_offload_v1", "te_version"),
        broken=lambda o: (
            o.fine_grained_activation_offloading
            and o.nvte_cpu_offload_v1 != "1"
            and (not o.te_version or o.te_version >= (2, 10))
        ),
        what="without NVTE_CPU_OFFLOAD_V1=1, offloading would take weights along",
        fix="set NVTE_CPU_OFFLOAD_V1=1",
    ),
    Rule(
        code="offload-local-parts",
        fields=(*_FINE, "cuda_graph_impl", "unknown_offload_modules"),
        broken=lambda o: (
            o.fine_grained_activation_offloading
            and o.cuda_graph_impl == "local"
            and not o.unknown_offload_modules
            and any(module not in _EXPERT_PARTS for module in o.offload_modules)
        ),
        what="local can offload only what stays outside of its graphs: expert_fc1, moe_act and fused_group_mlp",
        fix="leave the others out of --offload-modules, or use --cuda-graph-impl transformer_engine",
    ),
    Rule(
        code="offload-local-whole-layers",
        fields=("fine_grained_activation_offloading", *_GRAPH),
        broken=lambda o: (
            o.fine_grained_activation_offloading and o.cuda_graph_impl == "local" and len(o.cuda_graph_modules) == 0
        ),
        what="local captures whole layers, and nothing inside of a graph can be offloaded",
        fix="name modules without experts, such as --cuda-graph-modules attn moe_router",
    ),
    Rule(
        code="offload-captured-experts",
        fields=("fine_grained_activation_offloading", *_GRAPH),
        broken=lambda o: o.fine_grained_activation_offloading and names_module(o, "moe"),
        what="experts that are captured as a whole cannot be offloaded",
        fix="name moe_router and moe_preprocess instead of moe",
    ),
    Rule(
        code="offload-warmup",
        fields=("fine_grained_activation_offloading", "cuda_graph_impl", "cuda_graph_warmup_steps"),
        broken=lambda o: (
            o.fine_grained_activation_offloading and o.cuda_graph_impl != "none" and o.cuda_graph_warmup_steps <= 0
        ),
        what="offloading learns in the warmup what there is to offload, and there is no warmup",
        fix="use --cuda-graph-warmup-steps 1 or more",
    ),
    Rule(
        code="offload-inflight",
        fields=(
            "fine_grained_activation_offloading",
            "cuda_graph_impl",
            "fine_grained_offloading_max_inflight_offloads",
        ),
        broken=lambda o: (
            o.fine_grained_activation_offloading
            and o.cuda_graph_impl == "full_iteration"
            and o.fine_grained_offloading_max_inflight_offloads is None
        ),
        what="inside the graph of full_iteration, a fixed number of copies is under way",
        fix="add --fine-grained-offloading-max-inflight-offloads 1",
    ),
    Rule(
        code="offload-norm-in-graph",
        fields=(*_FINE, *_GRAPH),
        broken=lambda o: (
            o.cuda_graph_impl == "transformer_engine"
            and (
                (_offloads(o, "attn_norm") and names_module(o, "attn"))
                or (_offloads(o, "mlp_norm") and names_module(o, "mlp", "moe_router"))
            )
        ),
        what="a norm at the edge of a graph is not offloaded: its output is a static tensor",
        fix="leave attn_norm and mlp_norm out of --offload-modules",
        is_notice=True,
    ),
    Rule(
        code="optimizer-offload-precision",
        fields=("optimizer_cpu_offload", "use_precision_aware_optimizer"),
        broken=lambda o: o.optimizer_cpu_offload and not o.use_precision_aware_optimizer,
        what="--optimizer-cpu-offload is a form of the precision-aware optimizer",
        fix="add --use-precision-aware-optimizer --use-distributed-optimizer",
    ),
    *idle(
        ("offload_modules", "fine_grained_offloading_max_inflight_offloads", "min_offloaded_tensor_size"),
        ("fine_grained_activation_offloading",),
        lambda o: not o.fine_grained_activation_offloading,
        "no parts are offloaded",
        "add --fine-grained-activation-offloading, or leave it out",
    ),
    *idle(
        ("activation_offload_fraction",),
        ("fine_grained_activation_offloading",),
        lambda o: not o.fine_grained_activation_offloading,
        "no parts are offloaded",
        "add --fine-grained-activation-offloading, or leave it out",
    ),
    no_effect(
        "delayed-offload-without-effect",
        ("delay_offload_until_cuda_graph", "cuda_graph_impl", "fine_grained_activation_offloading"),
        lambda o: (
            o.delay_offload_until_cuda_graph
            and (o.cuda_graph_impl != "transformer_engine" or not o.fine_grained_activation_offloading)
        ),
        "--delay-offload-until-cuda-graph has no effect: nothing is offloaded beside graphs of transformer_engine",
        "leave it out",
    ),
)
