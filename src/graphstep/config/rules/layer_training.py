"""What ``graphstep train`` asks of models with experts, and of patterns of layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from graphstep.config.layer_pattern import letters_at, pattern_layers
from graphstep.config.rules.graphs import captures_whole_layers, modules_in_no_layer, modules_present
from graphstep.config.rules.mamba import MAMBA_RULES, has_letter
from graphstep.config.rules.moe import EXPERT_SHAPES, STATIC_EXPERTS, STATIC_EXPERTS_ON_PAGE, drops_and_pads
from graphstep.config.rules.rule import Rule
from graphstep.config.static_experts import static_experts_advice

_PARTS_ON_PAGE = "capture parts of layers: --cuda-graph-impl local --cuda-graph-modules attn moe_router moe_preprocess"
_BESIDE_EXPERTS = (("attn ", "*"), ("mlp ", "-"), ("mamba ", "M"))
_UNKNOWN_LETTERS = "GD|/"  # Layers and separators of Megatron-LM's patterns.
_PADDED = ("moe_expert_capacity_factor", "moe_pad_expert_input_to_capacity")
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
    return options.num_experts is not None and options.moe_grouped_gemm and not drops_and_pads(options)


def _leaves_experts_out(options: Any) -> bool:
    return bool(captures_whole_layers(options) and options.num_experts and options.dynamic_experts)


def _ways_out(options: Any) -> dict[str, str]:
    """Return how to have static experts, and what to do without them."""
    impl = "" if options.cuda_graph_impl != "full_iteration" else " --cuda-graph-impl local"
    letters = pattern_layers(options.hybrid_layer_pattern or "*")
    has = "".join(module for module, letter in _BESIDE_EXPERTS if letter in letters)
    parts = f"capture parts of layers:{impl} --cuda-graph-modules {has}moe_router moe_preprocess"
    if options.cuda_graph_policy == "required" and options.cuda_graph_impl == "local":
        parts += "; or let layers with experts run eagerly: --cuda-graph-policy auto"
    elif options.cuda_graph_policy != "required" and options.cuda_graph_impl == "transformer_engine":
        parts += f" (--cuda-graph-policy {options.cuda_graph_policy} has no effect with transformer_engine)"
    return {"advice": static_experts_advice(options), "parts": parts}


def _may_stay_eager(options: Any) -> bool:
    return bool(options.cuda_graph_policy != "required" and options.cuda_graph_impl != "transformer_engine")


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
        what="the pattern {hybrid_layer_pattern} has layers with experts, and their number is not known",
        fix="add --num-experts, or leave E out of --hybrid-layer-pattern",
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
        code="topk-exceeds-one-expert",
        fields=("moe_router_topk", "num_experts"),
        broken=lambda o: o.num_experts is not None and o.num_experts < o.moe_router_topk <= 2,
        what="a token cannot go to {moe_router_topk} of {num_experts} experts",
        fix="use --moe-router-topk 1 --moe-router-pre-softmax, or more experts",
        for_training=True,
    ),
    Rule(
        code="not-available-flex-dispatcher",
        fields=("moe_token_dispatcher_type", "num_experts"),
        broken=lambda o: o.num_experts is not None and o.moe_token_dispatcher_type == "flex",
        what="the flex dispatcher is not available yet in graphstep train",
        fix="use --moe-token-dispatcher-type alltoall or allgather",
        for_training=True,
    ),
    Rule(
        code="whole-layers-need-static-experts",
        fields=(*_GRAPH, *EXPERT_SHAPES, "dynamic_experts", "hybrid_layer_pattern"),
        blames=("cuda_graph_impl", "num_experts", *STATIC_EXPERTS),
        broken=lambda o: _leaves_experts_out(o) and not _may_stay_eager(o),
        what="with --cuda-graph-impl {cuda_graph_impl} experts are inside of graphs, and cannot be: {dynamic_experts}",
        details=_ways_out,
        fix="{advice}; or {parts}",
        fix_on_page=f"{STATIC_EXPERTS_ON_PAGE}; or {_PARTS_ON_PAGE}",
        for_training=True,
    ),
    Rule(
        code="dynamic-experts-stay-eager",
        fields=(*_GRAPH, *EXPERT_SHAPES, "dynamic_experts", "hybrid_layer_pattern"),
        blames=("cuda_graph_impl", "num_experts", *STATIC_EXPERTS),
        broken=lambda o: _leaves_experts_out(o) and _may_stay_eager(o) and o.cuda_graph_policy != "off",
        what="what has experts in it will run eagerly with --cuda-graph-impl {cuda_graph_impl}: {dynamic_experts}",
        details=_ways_out,
        fix="{advice}; or {parts}",
        fix_on_page=f"{STATIC_EXPERTS_ON_PAGE}; or {_PARTS_ON_PAGE}",
        is_notice=True,
        for_training=True,
    ),
    Rule(
        code="moe-grouped-gemm-bias",
        fields=("num_experts", "moe_grouped_gemm", "add_bias_linear", *_PADDED),
        blames=("moe_grouped_gemm", "add_bias_linear"),
        broken=lambda o: _multiplies_in_groups(o) and o.add_bias_linear,
        what="experts in one grouped matrix multiplication have no biases, and linear layers have them",
        fix="add --disable-bias-linear, or leave --moe-grouped-gemm out",
        for_training=True,
    ),
    Rule(
        code="moe-grouped-gemm-sizes",
        fields=(
            "num_experts",
            "moe_grouped_gemm",
            "hidden_size",
            "ffn_hidden_size",
            "moe_ffn_hidden_size",
            "device",
            *_PADDED,
        ),
        blames=("hidden_size", "moe_ffn_hidden_size"),
        broken=lambda o: (
            _multiplies_in_groups(o)
            and o.device != "cpu"
            and (o.hidden_size % 8 or (o.moe_ffn_hidden_size or o.ffn_hidden_size) % 8)
        ),
        what="the grouped matrix multiplication of a GPU needs widths that are multiples of 8, and the hidden size is "
        "{hidden_size}, the width of an expert {moe_ffn_hidden_size} (None: {ffn_hidden_size})",
        fix="round --hidden-size and --moe-ffn-hidden-size to multiples of 8, or use --device cpu",
        for_training=True,
    ),
    *(_of_mamba_layers(rule) for rule in MAMBA_RULES if not rule.is_range),
)
