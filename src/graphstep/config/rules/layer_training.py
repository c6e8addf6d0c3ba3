"""What ``graphstep train`` asks of models with experts, and of patterns of layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graphstep.config.expert_advice import PARTS_ON_PAGE, STATIC_EXPERTS_ON_PAGE, ways_out
from graphstep.config.layer_pattern import letters_at, pattern_layers
from graphstep.config.rules.graphs import (
    captures_whole_layers,
    modules_in_no_layer,
    modules_present,
    names_module,
)
from graphstep.config.rules.mamba import MAMBA_RULES, has_letter
from graphstep.config.rules.moe import EXPERT_SHAPES, STATIC_EXPERTS, drops_and_pads
from graphstep.config.rules.rule import Rule
from graphstep.config.static_experts import width_multiple

_UNKNOWN_LETTERS = "GD|/"  # Layers and separators of Megatron-LM's patterns.
_PADDED = ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity")
_SCORES = ("moe_router_pre_softmax", "moe_router_score_function", "moe_router_enable_expert_bias")
_BESIDE = ("dynamic_experts", "parts_beside_experts", "compile", "fuse_gradient_accumulation")
_GRAPH = ("cuda_graph_impl", "cuda_graph_modules", "cuda_graph_policy")


def _of_mamba_layers(rule: Rule) -> Rule:
    """Return what a Mamba layer insists on, for patterns that have one."""
    return replace(
        rule,
        fields=(*rule.fields, "hybrid_layer_pattern"),
        broken=lambda options: has_letter(options, "M") and rule.broken(options),
        for_training=True,
    )


def _multiplies_in_groups(options: Any) -> bool:
    return bool(options.has_expert_layers and options.moe_grouped_gemm and not drops_and_pads(options))


def _scores_given(options: Any) -> list[str]:
    """Return the options about scores that are not at their defaults."""
    given = (
        ("--moe-router-pre-softmax", options.moe_router_pre_softmax),
        ("--moe-router-score-function", options.moe_router_score_function != "softmax"),
        ("--moe-router-enable-expert-bias", options.moe_router_enable_expert_bias),
    )
    return [name for name, is_given in given if is_given]


def _without_expert_layers(options: Any) -> dict[str, str]:
    has_others = set(pattern_layers(options.hybrid_layer_pattern)) > {"E"}
    return {"change": "add --num-experts" + ", or leave E out of --hybrid-layer-pattern" * has_others}


def _width(options: Any) -> int:
    return int(options.moe_ffn_hidden_size or options.ffn_hidden_size)


def _one_choice(options: Any) -> dict[str, str]:
    """Return how one expert a token is chosen with gradients for the router."""
    needs = options.moe_router_score_function == "softmax" and not options.moe_router_pre_softmax
    return {"one": "--moe-router-topk 1" + (" --moe-router-pre-softmax" if needs else "")}


def _another_dispatcher(options: Any) -> dict[str, str]:
    rest = ", and leave --moe-flex-dispatcher-backend out" if options.moe_flex_dispatcher_backend == "ncclep" else ""
    return {"change": f"use --moe-token-dispatcher-type alltoall or allgather{rest}"}


def _without_biases(options: Any) -> dict[str, str]:
    needs = options.cuda_graph_policy != "off" and (captures_whole_layers(options) or names_module(options, "moe"))
    return {"change": "add --disable-bias-linear" + ("" if needs else ", or leave --moe-grouped-gemm out")}


def _leaves_experts_out(options: Any) -> bool:
    is_on = options.cuda_graph_policy != "off"
    return bool(is_on and captures_whole_layers(options) and options.dynamic_experts)


def _may_stay_eager(options: Any) -> bool:
    return bool(options.cuda_graph_policy == "auto" and options.cuda_graph_impl != "transformer_engine")


LAYER_TRAINING_RULES: tuple[Rule, ...] = (
    Rule(
        code="not-available-pattern-letter",
        fields=("hybrid_layer_pattern",),
        broken=lambda o: bool(set(o.hybrid_layer_pattern or ()) & set(_UNKNOWN_LETTERS)),
        details=lambda o: {"found": letters_at(o.hybrid_layer_pattern, _UNKNOWN_LETTERS)},
        what="of --hybrid-layer-pattern, graphstep train knows the letters M * - E only, and no | or / yet: in "
        "{hybrid_layer_pattern}, {found}",
        fix="write such as M*-E: Mamba, attention, MLP, experts",
        for_training=True,
    ),
    Rule(
        code="pattern-needs-experts",
        fields=("hybrid_layer_pattern", "num_experts"),
        broken=lambda o: has_letter(o, "E") and o.num_experts is None,
        details=_without_expert_layers,
        what="the pattern {hybrid_layer_pattern} has layers with experts, and their number is not known",
        fix="{change}",
        fix_on_page="add --num-experts, or leave E out of --hybrid-layer-pattern",
        for_training=True,
    ),
    Rule(
        code="module-in-no-layer",
        fields=("cuda_graph_impl", "cuda_graph_modules", "inference_cuda_graph_scope", "num_experts", "layer_modules"),
        blames=("cuda_graph_modules",),
        broken=lambda o: bool(modules_in_no_layer(o)),
        details=lambda o: {"missing": " ".join(modules_in_no_layer(o)), "present": modules_present(o)},
        what="graphs of {missing} were asked for, and no layer of this model has such a part",
        fix="leave {missing} out; the parts are {present}",
        for_training=True,
    ),
    Rule(
        code="experts-without-layer",
        fields=("hybrid_layer_pattern", "moe_layer_freq", "num_experts", "layer_modules"),
        broken=lambda o: o.num_experts is not None and "moe" not in o.layer_modules,
        what="--num-experts has no effect: no layer of this model has experts",
        fix="add an E to --hybrid-layer-pattern or a 1 to --moe-layer-freq, or leave --num-experts out",
        is_notice=True,
        for_training=True,
    ),
    Rule(
        code="sinkhorn-without-scores",
        fields=("moe_router_load_balancing_type", "has_expert_layers", *_SCORES),
        blames=("moe_router_load_balancing_type", *_SCORES),
        broken=lambda o: (
            o.has_expert_layers and o.moe_router_load_balancing_type == "sinkhorn" and bool(_scores_given(o))
        ),
        details=lambda o: {"given": " ".join(_scores_given(o))},
        what="{given} has no effect: with sinkhorn, experts are chosen by the balanced load alone",
        fix="leave it out",
        is_notice=True,
        for_training=True,
    ),
    Rule(
        code="topk-exceeds-one-expert",
        fields=(
            "moe_router_topk",
            "num_experts",
            "has_expert_layers",
            "moe_router_score_function",
            "moe_router_pre_softmax",
        ),
        blames=("moe_router_topk", "num_experts"),
        broken=lambda o: o.has_expert_layers and o.num_experts is not None and o.num_experts < o.moe_router_topk <= 2,
        details=_one_choice,
        what="a token cannot go to {moe_router_topk} of {num_experts} experts",
        fix="use {one}, or more experts",
        fix_on_page="use --moe-router-topk 1, with a softmax --moe-router-pre-softmax as well, or more experts",
        for_training=True,
    ),
    Rule(
        code="not-available-flex-dispatcher",
        fields=("moe_token_dispatcher_type", "moe_flex_dispatcher_backend", "has_expert_layers"),
        blames=("moe_token_dispatcher_type",),
        broken=lambda o: o.has_expert_layers and o.moe_token_dispatcher_type == "flex",
        details=_another_dispatcher,
        what="the flex dispatcher is not available yet in graphstep train",
        fix="{change}",
        fix_on_page="use --moe-token-dispatcher-type alltoall or allgather",
        for_training=True,
    ),
    Rule(
        code="whole-layers-need-static-experts",
        fields=(*_GRAPH, *EXPERT_SHAPES, *_BESIDE),
        blames=("cuda_graph_impl", "num_experts", *STATIC_EXPERTS),
        broken=lambda o: _leaves_experts_out(o) and not _may_stay_eager(o),
        what="with --cuda-graph-impl {cuda_graph_impl} experts are inside of graphs, and cannot be: {dynamic_experts}",
        details=ways_out,
        fix="{ways}",
        fix_on_page=f"{STATIC_EXPERTS_ON_PAGE}; or {PARTS_ON_PAGE}",
        for_training=True,
    ),
    Rule(
        code="dynamic-experts-stay-eager",
        fields=(*_GRAPH, *EXPERT_SHAPES, *_BESIDE),
        blames=("cuda_graph_impl", "num_experts", *STATIC_EXPERTS),
        broken=lambda o: _leaves_experts_out(o) and _may_stay_eager(o),
        what="what has experts in it will run eagerly with --cuda-graph-impl {cuda_graph_impl}: {dynamic_experts}",
        details=ways_out,
        fix="{ways}",
        fix_on_page=f"{STATIC_EXPERTS_ON_PAGE}; or {PARTS_ON_PAGE}",
        is_notice=True,
        for_training=True,
    ),
    Rule(
        code="moe-grouped-gemm-bias",
        fields=(*_GRAPH, "has_expert_layers", "moe_grouped_gemm", "add_bias_linear", *_PADDED),
        blames=("moe_grouped_gemm", "add_bias_linear"),
        broken=lambda o: _multiplies_in_groups(o) and o.add_bias_linear,
        details=_without_biases,
        what="experts in one grouped matrix multiplication have no biases, and linear layers have them",
        fix="{change}",
        fix_on_page="add --disable-bias-linear; or leave --moe-grouped-gemm out, where experts are not captured",
        for_training=True,
    ),
    Rule(
        code="moe-grouped-gemm-sizes",
        fields=(
            "has_expert_layers",
            "moe_grouped_gemm",
            "hidden_size",
            "ffn_hidden_size",
            "moe_ffn_hidden_size",
            "bf16",
            "device",
            *_PADDED,
        ),
        blames=("hidden_size", "moe_ffn_hidden_size", "ffn_hidden_size"),
        broken=lambda o: (
            _multiplies_in_groups(o) and bool(o.hidden_size % width_multiple(o) or _width(o) % width_multiple(o))
        ),
        details=lambda o: {"multiple": str(width_multiple(o)), "width": str(_width(o))},
        what="the grouped matrix multiplication needs widths that are multiples of {multiple}, and the hidden size is "
        "{hidden_size}, the width of an expert {width}",
        fix="round --hidden-size, and --moe-ffn-hidden-size or --ffn-hidden-size, to multiples of {multiple}",
        for_training=True,
    ),
    *(_of_mamba_layers(rule) for rule in MAMBA_RULES if not rule.is_range),
)
