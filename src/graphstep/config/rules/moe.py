"""Rules about experts."""

from __future__ import annotations

from typing import Any

from graphstep.config.expert_advice import STATIC_EXPERTS_ON_PAGE, router_parts, ways_for_module
from graphstep.config.rules.graphs import captures_whole_layers, has_experts, names_module
from graphstep.config.rules.rule import Rule, at_least, idle, in_range, no_effect, optional, words_of
from graphstep.config.static_experts import reads_counts_on_the_host

_GRAPH = ("cuda_graph_impl", "cuda_graph_modules")
_RANK = "moe_expert_rank_capacity_factor"
_DISPATCH = ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend")
EXPERT_SHAPES = (
    "num_experts",
    "moe_expert_capacity_factor",
    "moe_pad_expert_input_to_capacity",
    "moe_grouped_gemm",
    "moe_token_dispatcher_type",
    "expert_model_parallel_size",
    "bf16",
    "device",
    "add_bias_linear",
    "moe_router_load_balancing_type",
    "moe_router_padding_for_quantization",
    "hidden_size",
    "ffn_hidden_size",
    "moe_ffn_hidden_size",
)
"""What decides whether experts can be inside of a graph, and what to do about it."""
STATIC_EXPERTS = ("moe_grouped_gemm", "moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity")
"""What makes them static."""
_EXPERT_PARTS = frozenset({"expert_fc1", "moe_act", "fused_group_mlp"})

_NEED_EXPERTS = (
    "moe_layer_freq",
    "moe_ffn_hidden_size",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_score_function",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_router_load_balancing_type",
    "moe_router_dtype",
    "moe_router_num_groups",
    "moe_router_topk_scaling_factor",
    "moe_input_jitter_eps",
    "moe_hybridep_pad_uneven_dispatch_inputs",
    "moe_expert_capacity_factor",
    "moe_token_drop_policy",
    "moe_token_dispatcher_type",
    "moe_flex_dispatcher_backend",
    "moe_grouped_gemm",
    "moe_shared_expert_intermediate_size",
    "moe_latent_size",
    "moe_permute_fusion",
    "moe_pad_experts_for_cuda_graph_inference",
)


def drops_and_pads(options: Any) -> bool:
    """Does every expert take a fixed number of tokens?"""
    return options.moe_expert_capacity_factor is not None and options.moe_pad_expert_input_to_capacity


def _has_groups(options: Any) -> bool:
    return options.moe_router_group_topk is not None and options.moe_router_num_groups is not None


def _without_preprocess(options: Any) -> dict[str, str]:
    has_capacity = options.moe_expert_capacity_factor is not None
    first = "add --moe-pad-expert-input-to-capacity" if has_capacity else "use --moe-token-dispatcher-type allgather"
    modules = " ".join(filter(None, (options.parts_beside_experts, router_parts(options))))
    return {"ways": f"{first}, or name no more than {modules}" if modules else first}


def _is_freq(value: Any) -> bool:
    return value >= 1 if isinstance(value, int) else len(value) > 0 and set(value) <= {0, 1}


MOE_RULES: tuple[Rule, ...] = (
    *words_of(
        "moe_router_load_balancing_type",
        "moe_router_score_function",
        "moe_router_dtype",
        "moe_token_drop_policy",
        *_DISPATCH,
    ),
    optional("num_experts", lambda v: v >= 1, "at least 1", "leave it out for no experts"),
    in_range(
        "moe_layer_freq", _is_freq, "a number above 0 or a list of 0 and 1", "write such as 2, or [0,1] for 2 layers"
    ),
    optional("moe_ffn_hidden_size", lambda v: v >= 1, "at least 1", "leave it out for --ffn-hidden-size"),
    at_least(1, "moe_router_topk", "use 1 or more experts a token"),
    optional("moe_shared_expert_intermediate_size", lambda v: v >= 1, "at least 1", "leave it out for none"),
    optional("moe_latent_size", lambda v: v >= 1, "at least 1", "leave it out"),
    in_range(
        "moe_expert_capacity_factor",
        lambda v: v is None or v != 0,
        "above 0, or negative for no limit",
        "use 1.0 for a balanced load",
    ),
    optional("moe_router_num_groups", lambda v: v >= 1, "at least 1", "leave it out for no groups"),
    optional("moe_router_group_topk", lambda v: v >= 1, "at least 1", "leave it out for all groups"),
    optional("moe_router_topk_scaling_factor", lambda v: v > 0, "above 0", "leave it out for none"),
    in_range("moe_router_bias_update_rate", lambda v: v >= 0, "0 or above", "use 1e-3"),
    in_range("moe_aux_loss_coeff", lambda v: v >= 0, "0 or above", "use 1e-2, or leave it out for no loss"),
    optional("moe_z_loss_coeff", lambda v: v >= 0, "0 or above", "use 1e-3, or leave it out for no loss"),
    optional("moe_input_jitter_eps", lambda v: 0 <= v <= 1, "between 0 and 1", "use 1e-2, or leave it out for none"),
    optional(_RANK, lambda v: v > 0, "above 0", "use 1.5, or leave it out for a dynamic budget"),
    at_least(1, "moe_paged_stash_page_size", "use 64"),
    Rule(
        code="topk-exceeds-experts",
        fields=("moe_router_topk", "num_experts"),
        broken=lambda o: o.num_experts is not None and o.moe_router_topk > max(o.num_experts, 2),
        what="a token cannot go to {moe_router_topk} of {num_experts} experts",
        fix="lower --moe-router-topk to {num_experts} or less",
    ),
    Rule(
        code="layer-freq-length",
        fields=("moe_layer_freq", "num_layers", "num_experts", "hybrid_layer_pattern"),
        broken=lambda o: (
            o.num_experts is not None
            and o.hybrid_layer_pattern is None
            and not isinstance(o.moe_layer_freq, int)
            and len(o.moe_layer_freq) != o.num_layers
        ),
        what="--moe-layer-freq lists another number of layers than the {num_layers} of the model",
        fix="give one 0 or 1 for each layer",
    ),
    Rule(
        code="topk-one-softmax",
        fields=(
            "moe_router_topk",
            "moe_router_pre_softmax",
            "moe_router_score_function",
            "moe_router_load_balancing_type",
        ),
        broken=lambda o: (
            o.moe_router_topk == 1
            and not o.moe_router_pre_softmax
            and o.moe_router_score_function == "softmax"
            and o.moe_router_load_balancing_type != "sinkhorn"
        ),
        what="a softmax over the one chosen expert is always 1 and has no gradient",
        fix="add --moe-router-pre-softmax",
    ),
    Rule(
        code="group-topk-needs-groups",
        fields=("moe_router_group_topk", "moe_router_num_groups"),
        broken=lambda o: o.moe_router_group_topk is not None and o.moe_router_num_groups is None,
        what="a token cannot choose {moe_router_group_topk} groups of experts: there are no groups",
        fix="add --moe-router-num-groups, or leave --moe-router-group-topk out",
    ),
    Rule(
        code="group-topk-exceeds-groups",
        fields=("moe_router_group_topk", "moe_router_num_groups"),
        broken=lambda o: _has_groups(o) and o.moe_router_group_topk > o.moe_router_num_groups,
        what="a token cannot choose {moe_router_group_topk} of {moe_router_num_groups} groups of experts",
        fix="lower --moe-router-group-topk",
    ),
    Rule(
        code="groups-divide-experts",
        fields=("moe_router_num_groups", "moe_router_group_topk", "num_experts"),
        broken=lambda o: _has_groups(o) and o.num_experts is not None and o.num_experts % o.moe_router_num_groups != 0,
        what="{num_experts} experts cannot be divided into {moe_router_num_groups} groups",
        fix="use a --moe-router-num-groups that divides --num-experts",
    ),
    Rule(
        code="groups-hold-topk",
        fields=("moe_router_num_groups", "moe_router_group_topk", "moe_router_topk", "num_experts"),
        broken=lambda o: (
            _has_groups(o)
            and has_experts(o)
            and o.moe_router_group_topk <= o.moe_router_num_groups
            and o.num_experts % o.moe_router_num_groups == 0
            and not o.moe_router_group_topk
            <= o.moe_router_topk
            <= o.moe_router_group_topk * (o.num_experts // o.moe_router_num_groups)
        ),
        what="{moe_router_group_topk} of {moe_router_num_groups} groups cannot hold the {moe_router_topk} of "
        "{num_experts} experts of a token: each chosen group gives at least one",
        fix="choose --moe-router-group-topk such that it is at most --moe-router-topk, and the chosen groups have as "
        "many experts",
    ),
    Rule(
        code="expert-bias-score",
        fields=("moe_router_enable_expert_bias", "moe_router_score_function"),
        broken=lambda o: o.moe_router_enable_expert_bias and o.moe_router_score_function != "sigmoid",
        what="a bias an expert balances scores of a sigmoid only",
        fix="add --moe-router-score-function sigmoid",
    ),
    Rule(
        code="capacity-balancing",
        fields=("moe_expert_capacity_factor", "moe_router_load_balancing_type"),
        broken=lambda o: o.moe_expert_capacity_factor is not None and o.moe_router_load_balancing_type == "sinkhorn",
        what="a capacity goes with a balancing loss or none, not with sinkhorn",
        fix="use --moe-router-load-balancing-type aux_loss",
    ),
    Rule(
        code="padding-needs-capacity",
        fields=("moe_pad_expert_input_to_capacity", "moe_expert_capacity_factor"),
        broken=lambda o: o.moe_pad_expert_input_to_capacity and o.moe_expert_capacity_factor is None,
        what="--moe-pad-expert-input-to-capacity needs a capacity to pad to",
        fix="add --moe-expert-capacity-factor 1.0, or leave --moe-pad-expert-input-to-capacity out",
    ),
    Rule(
        code="padding-dispatcher",
        fields=("moe_pad_expert_input_to_capacity", *_DISPATCH),
        broken=lambda o: (
            o.moe_pad_expert_input_to_capacity
            and o.moe_token_dispatcher_type == "flex"
            and o.moe_flex_dispatcher_backend != "hybridep"
        ),
        what="the flex dispatcher on {moe_flex_dispatcher_backend} cannot pad experts to their capacity",
        fix="use --moe-flex-dispatcher-backend hybridep, or --moe-token-dispatcher-type alltoall",
    ),
    Rule(
        code="moe-needs-static-shapes",
        fields=(*_GRAPH, "cuda_graph_policy", *EXPERT_SHAPES, "dynamic_experts"),
        blames=("cuda_graph_modules", "num_experts", *STATIC_EXPERTS),
        broken=lambda o: names_module(o, "moe") and has_experts(o) and bool(o.dynamic_experts),
        details=ways_for_module,
        what="experts can be captured only with static shapes and without reads on the host: {dynamic_experts}",
        fix="{ways}",
        fix_on_page=f"{STATIC_EXPERTS_ON_PAGE}; or name moe_router, not moe",
    ),
    Rule(
        code="grouped-gemm-half-precision",
        fields=(*_GRAPH, *EXPERT_SHAPES, "layer_modules", "dynamic_experts"),
        blames=("moe_grouped_gemm", "bf16"),
        broken=lambda o: (
            (captures_whole_layers(o) or names_module(o, "moe"))
            and has_experts(o)
            and "moe" in o.layer_modules
            and not o.dynamic_experts
            and not drops_and_pads(o)
            and not o.bf16
            and o.device == "auto"
        ),
        what="without --bf16, the grouped matrix multiplication of a GPU reads its offsets on the host: experts can be "
        "captured on the CPU only",
        fix="add --bf16, or use --device cpu",
        is_notice=True,
    ),
    Rule(
        code="preprocess-reads-counts",
        fields=(
            *_GRAPH,
            "num_experts",
            "moe_token_dispatcher_type",
            "moe_expert_capacity_factor",
            "moe_pad_expert_input_to_capacity",
            "moe_router_padding_for_quantization",
            "parts_beside_experts",
        ),
        broken=lambda o: names_module(o, "moe_preprocess") and has_experts(o) and reads_counts_on_the_host(o),
        details=_without_preprocess,
        what="the alltoall dispatcher reads token counts back to the host in moe_preprocess, which local captures "
        "together with moe_router, when experts have a capacity or padding of the router without being padded to it",
        fix="{ways}",
        fix_on_page="add --moe-pad-expert-input-to-capacity, or leave moe_preprocess out, with local moe_router too",
    ),
    Rule(
        code="shared-expert-overlap-dispatcher",
        fields=("moe_shared_expert_overlap", "moe_shared_expert_intermediate_size", "moe_token_dispatcher_type"),
        broken=lambda o: (
            o.moe_shared_expert_overlap
            and o.moe_shared_expert_intermediate_size is not None
            and o.moe_token_dispatcher_type == "allgather"
        ),
        what="the shared expert can run beside the exchange of tokens of the alltoall and flex dispatchers only",
        fix="use --moe-token-dispatcher-type alltoall, or leave --moe-shared-expert-overlap out",
    ),
    Rule(
        code="ncclep-dispatcher",
        fields=_DISPATCH,
        broken=lambda o: o.moe_flex_dispatcher_backend == "ncclep" and o.moe_token_dispatcher_type != "flex",
        what="ncclep is a backend of the flex dispatcher, and the dispatcher is {moe_token_dispatcher_type}",
        fix="add --moe-token-dispatcher-type flex, or leave --moe-flex-dispatcher-backend out",
    ),
    Rule(
        code="grouped-tensor-gemm",
        fields=("moe_use_grouped_tensor", "moe_grouped_gemm"),
        broken=lambda o: o.moe_use_grouped_tensor and not o.moe_grouped_gemm,
        what="--moe-use-grouped-tensor is about one matrix multiplication of all experts, and there is none",
        fix="add --moe-grouped-gemm, or leave --moe-use-grouped-tensor out",
    ),
    Rule(
        code="grouped-tensor-ncclep",
        fields=("moe_use_grouped_tensor", "moe_flex_dispatcher_backend", "use_transformer_engine_op_fuser"),
        broken=lambda o: (
            o.moe_use_grouped_tensor
            and o.moe_flex_dispatcher_backend == "ncclep"
            and not o.use_transformer_engine_op_fuser
        ),
        what="--moe-use-grouped-tensor with ncclep needs fused operations",
        fix="add --use-transformer-engine-op-fuser, or use --moe-flex-dispatcher-backend hybridep",
    ),
    Rule(
        code="rank-capacity-backend",
        fields=(_RANK, "moe_flex_dispatcher_backend"),
        broken=lambda o: (
            o.moe_expert_rank_capacity_factor is not None
            and o.moe_flex_dispatcher_backend not in ("hybridep", "ncclep")
        ),
        what="a static budget of an expert rank is known to hybridep and ncclep, not to {moe_flex_dispatcher_backend}",
        fix="use --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep, or leave "
        "--moe-expert-rank-capacity-factor out",
    ),
    Rule(
        code="rank-capacity-fusion",
        fields=(
            _RANK,
            "moe_flex_dispatcher_backend",
            "use_transformer_engine_op_fuser",
            "moe_use_grouped_tensor",
        ),
        broken=lambda o: (
            o.moe_expert_rank_capacity_factor is not None
            and o.moe_flex_dispatcher_backend == "hybridep"
            and not o.use_transformer_engine_op_fuser
            and not o.moe_use_grouped_tensor
        ),
        what="a static budget with hybridep needs experts that take their token counts from the device",
        fix="add --use-transformer-engine-op-fuser, or --moe-grouped-gemm --moe-use-grouped-tensor",
    ),
    Rule(
        code="rank-capacity-dispatcher",
        fields=(_RANK, *_DISPATCH),
        broken=lambda o: (
            o.moe_expert_rank_capacity_factor is not None
            and o.moe_flex_dispatcher_backend == "hybridep"
            and o.moe_token_dispatcher_type != "flex"
        ),
        what="the {moe_token_dispatcher_type} dispatcher cannot use a static budget of an expert rank",
        fix="add --moe-token-dispatcher-type flex",
    ),
    Rule(
        code="rank-capacity-experts",
        fields=(_RANK, "num_experts"),
        broken=lambda o: o.moe_expert_rank_capacity_factor is not None and o.num_experts is None,
        what="a static budget of an expert rank needs experts, and this model has none",
        fix="add --num-experts, or leave --moe-expert-rank-capacity-factor out",
    ),
    Rule(
        code="stash-needs-budget",
        fields=("moe_paged_stash", _RANK),
        broken=lambda o: o.moe_paged_stash and o.moe_expert_rank_capacity_factor is None,
        what="paged activations save the memory that a static budget wastes, and there is no such budget",
        fix="add --moe-expert-rank-capacity-factor 1.5, or leave --moe-paged-stash out",
    ),
    Rule(
        code="stash-offload",
        fields=("moe_paged_stash", "cpu_offloading_num_layers"),
        broken=lambda o: o.moe_paged_stash and o.cpu_offloading_num_layers > 0,
        what="activations of the experts cannot be paged while their layers are offloaded",
        fix="keep --moe-paged-stash or --cpu-offloading-num-layers",
    ),
    Rule(
        code="stash-offload-modules",
        fields=("moe_paged_stash", "offload_modules"),
        broken=lambda o: o.moe_paged_stash and bool(_EXPERT_PARTS.intersection(o.offload_modules)),
        what="the activations of expert_fc1, moe_act and fused_group_mlp are paged already",
        fix="leave them out of --offload-modules",
    ),
    Rule(
        code="zero-copy-needs-budget",
        fields=("moe_ncclep_zero_copy", _RANK),
        broken=lambda o: o.moe_ncclep_zero_copy and o.moe_expert_rank_capacity_factor is None,
        what="persistent buffers for the exchange of tokens have the size of a static budget, and there is none",
        fix="add --moe-expert-rank-capacity-factor 1.5",
    ),
    Rule(
        code="uneven-dispatch-host-reads",
        fields=("moe_hybridep_pad_uneven_dispatch_inputs", "cuda_graph_impl", "cuda_graph_modules"),
        broken=lambda o: (
            o.moe_hybridep_pad_uneven_dispatch_inputs
            and (o.cuda_graph_impl == "full_iteration" or names_module(o, "moe"))
        ),
        what="padding to the largest input of the group reads it back to the host, which a graph cannot do",
        fix="leave --moe-hybridep-pad-uneven-dispatch-inputs out if the capture fails",
        is_notice=True,
    ),
    *idle(
        _NEED_EXPERTS, ("num_experts",), lambda o: o.num_experts is None, "there are no experts", "add --num-experts"
    ),
    no_effect(
        "flex-backend-without-flex",
        ("given_moe_flex_dispatcher_backend", *_DISPATCH, "num_experts"),
        lambda o: (
            o.given_moe_flex_dispatcher_backend
            and o.moe_token_dispatcher_type != "flex"
            and o.moe_flex_dispatcher_backend != "ncclep"
            and o.num_experts is not None
        ),
        "--moe-flex-dispatcher-backend has no effect: the dispatcher is {moe_token_dispatcher_type}",
        "leave it out",
    ),
    no_effect(
        "uneven-dispatch-without-flex",
        ("moe_hybridep_pad_uneven_dispatch_inputs", "moe_token_dispatcher_type", "num_experts"),
        lambda o: (
            o.moe_hybridep_pad_uneven_dispatch_inputs
            and o.moe_token_dispatcher_type != "flex"
            and o.num_experts is not None
        ),
        "--moe-hybridep-pad-uneven-dispatch-inputs has no effect: the dispatcher is {moe_token_dispatcher_type}",
        "leave it out",
    ),
    no_effect(
        "layer-freq-beside-pattern",
        ("given_moe_layer_freq", "moe_layer_freq", "hybrid_layer_pattern", "num_experts"),
        lambda o: o.given_moe_layer_freq and o.hybrid_layer_pattern is not None and o.num_experts is not None,
        "--moe-layer-freq has no effect: the letters of --hybrid-layer-pattern say which layers have experts",
        "leave one of the two out",
    ),
    *idle(
        ("moe_router_bias_update_rate",),
        ("moe_router_enable_expert_bias",),
        lambda o: not o.moe_router_enable_expert_bias,
        "no bias balances the experts",
        "add --moe-router-enable-expert-bias, or leave it out",
    ),
    no_effect(
        "balancing-without-weight",
        ("given_moe_router_load_balancing_type", "moe_router_load_balancing_type", "moe_aux_loss_coeff", "num_experts"),
        lambda o: (
            o.given_moe_router_load_balancing_type
            and o.moe_router_load_balancing_type.endswith("aux_loss")
            and o.moe_aux_loss_coeff == 0
            and o.num_experts is not None
        ),
        "--moe-router-load-balancing-type {moe_router_load_balancing_type} has no effect: the weight of that loss is 0",
        "add --moe-aux-loss-coeff 1e-2",
    ),
    no_effect(
        "weight-without-balancing",
        ("moe_router_load_balancing_type", "moe_aux_loss_coeff", "num_experts"),
        lambda o: (
            not o.moe_router_load_balancing_type.endswith("aux_loss")
            and o.moe_aux_loss_coeff != 0
            and o.num_experts is not None
        ),
        "--moe-aux-loss-coeff has no effect: {moe_router_load_balancing_type} balances without a loss",
        "use --moe-router-load-balancing-type aux_loss, or leave it out",
    ),
    no_effect(
        "drop-policy-without-capacity",
        ("given_moe_token_drop_policy", "moe_token_drop_policy", "moe_expert_capacity_factor", "num_experts"),
        lambda o: o.given_moe_token_drop_policy and o.moe_expert_capacity_factor is None and o.num_experts is not None,
        "--moe-token-drop-policy has no effect: no token is dropped without a capacity",
        "add --moe-expert-capacity-factor 1.0, or leave it out",
    ),
    no_effect(
        "expert-groups-without-effect",
        ("moe_router_num_groups", "moe_router_group_topk", "num_experts"),
        lambda o: o.moe_router_num_groups is not None and o.moe_router_group_topk is None and o.num_experts is not None,
        "--moe-router-num-groups has no effect: a token chooses from all groups",
        "add --moe-router-group-topk, or leave it out",
    ),
    *idle(
        ("moe_shared_expert_overlap", "moe_shared_expert_gate"),
        ("moe_shared_expert_intermediate_size",),
        lambda o: o.moe_shared_expert_intermediate_size is None,
        "there is no shared expert",
        "add --moe-shared-expert-intermediate-size, or leave it out",
    ),
    *idle(
        (
            "moe_paged_stash_page_size",
            "moe_paged_stash_buffer_size_factor_cuda",
            "moe_paged_stash_buffer_size_factor_cpu",
        ),
        ("moe_paged_stash",),
        lambda o: not o.moe_paged_stash,
        "no activations are paged",
        "add --moe-paged-stash, or leave it out",
    ),
)
