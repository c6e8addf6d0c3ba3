"""Rules about what is captured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphstep.config.expert_advice import modules_that_fit
from graphstep.config.layer_pattern import pattern_layers
from graphstep.config.rules.rule import Rule, at_least, idle, no_effect

_WHOLE = ("cuda_graph_impl", "cuda_graph_modules", "check_for_nan_in_loss_and_grad")
_MOE = ("moe", "moe_router", "moe_preprocess")
_LAYERS: Mapping[str, str] = {
    "attn": "attention layers",
    "mlp": "MLP layers without experts",
    "moe": "layers with experts",
    "moe_router": "layers with experts",
    "moe_preprocess": "layers with experts",
    "mamba": "Mamba layers",
}


def captures_by_module(options: Any) -> bool:
    """Are graphs captured for layers or modules?"""
    return options.cuda_graph_impl in ("local", "transformer_engine")


def has_experts(options: Any) -> bool:
    """Are there experts to choose from?"""
    return options.num_experts is not None and options.num_experts > 1


def names_module(options: Any, *modules: str) -> bool:
    """Is one of these modules named, and captured by itself?"""
    return captures_by_module(options) and any(module in options.cuda_graph_modules for module in modules)


def captures_whole_layers(options: Any) -> bool:
    """Is all of a layer inside of graphs?"""
    return options.cuda_graph_impl == "full_iteration" or (
        captures_by_module(options) and not options.cuda_graph_modules
    )


def _whole_iteration(options: Any) -> dict[str, str]:
    """Return how to capture whole iterations instead."""
    nan = " --no-check-for-nan-in-loss-and-grad" if options.check_for_nan_in_loss_and_grad else ""
    modules = " without --cuda-graph-modules" if options.cuda_graph_modules else ""
    return {"whole": f"--cuda-graph-impl full_iteration{nan}{modules}"}


def _experts_to_add(options: Any) -> dict[str, str]:
    """Return what gives the model experts to choose from."""
    number = "--num-experts with 2 or more"
    is_without = options.hybrid_layer_pattern is not None and "E" not in pattern_layers(options.hybrid_layer_pattern)
    return {"experts": f"{number}, and an E to --hybrid-layer-pattern" if is_without else number}


def _matches_nothing(options: Any) -> bool:
    modules = set(options.cuda_graph_modules)
    # Experts that are missing altogether have a rule of their own, and graphs of the whole model need no module.
    asks_for_experts = bool(modules.intersection(_MOE)) and not has_experts(options)
    return (
        captures_by_module(options)
        and bool(modules)
        and not modules & options.layer_modules
        and not asks_for_experts
        and not (modules == {"mlp"} and has_experts(options))
        and options.inference_cuda_graph_scope != "block"
    )


def _is_unmatched(options: Any, module: str) -> bool:
    return (
        module in options.cuda_graph_modules
        and module not in options.layer_modules
        and (module != "mlp" or not has_experts(options))
        and (module not in _MOE or has_experts(options))
    )


def modules_in_no_layer(options: Any) -> tuple[str, ...]:
    """Return the named modules that no layer has, where others are captured."""
    if not captures_by_module(options) or _matches_nothing(options):
        return ()
    return tuple(module for module in _LAYERS if _is_unmatched(options, module))


def modules_present(options: Any) -> str:
    """Return the modules that layers of the model have, as an option takes them."""
    return " ".join(module for module in _LAYERS if module in options.layer_modules)


def _module_notice(module: str, layers: str) -> Rule:
    slug = module.replace("_", "-")
    return no_effect(
        f"no-layer-for-{slug}",
        ("cuda_graph_impl", "cuda_graph_modules", "inference_cuda_graph_scope", "num_experts", "layer_modules"),
        lambda o: captures_by_module(o) and _is_unmatched(o, module) and not _matches_nothing(o),
        f"module {module} matches no layer: this model has no {layers}",
        f"leave {module} out of --cuda-graph-modules",
    )


GRAPH_RULES: tuple[Rule, ...] = (
    at_least(0, "cuda_graph_warmup_steps", "use 3"),
    at_least(1, "cuda_graph_capture_after", "use 2, or 1 to capture whatever a step has seen"),
    at_least(1, "cuda_graph_max_signatures", "use 8"),
    at_least(0, "cuda_graph_merge_layers", "use 1 for none, or 0 for as many as can be"),
    Rule(
        code="full-iteration-nan-check",
        fields=("cuda_graph_impl", "check_for_nan_in_loss_and_grad", "skip_train"),
        broken=lambda o: (
            o.cuda_graph_impl == "full_iteration" and o.check_for_nan_in_loss_and_grad and not o.skip_train
        ),
        what="full_iteration cannot look for NaN in loss and gradients: reading a value inside the graph is impossible",
        fix="add --no-check-for-nan-in-loss-and-grad",
    ),
    Rule(
        code="compile-captured-modules",
        fields=("compile", *_WHOLE),
        blames=("cuda_graph_impl", "compile"),
        broken=lambda o: o.compile and captures_by_module(o),
        details=_whole_iteration,
        what="--compile takes the whole model, and --cuda-graph-impl {cuda_graph_impl} captures its layers one by one",
        fix="use {whole}, or leave --compile out",
        fix_on_page="use --cuda-graph-impl full_iteration, or leave --compile out",
    ),
    Rule(
        code="fusion-captured-modules",
        fields=("fuse_gradient_accumulation", *_WHOLE),
        blames=("cuda_graph_impl", "fuse_gradient_accumulation"),
        broken=lambda o: o.fuse_gradient_accumulation and captures_by_module(o),
        details=_whole_iteration,
        what="with --cuda-graph-impl {cuda_graph_impl} layers have graphs of their own, which add gradients their own "
        "way: --gradient-accumulation-fusion would round otherwise in them than outside",
        fix="use {whole}, or leave --gradient-accumulation-fusion out",
        fix_on_page="use --cuda-graph-impl full_iteration, or leave --gradient-accumulation-fusion out",
    ),
    Rule(
        code="parallel-weight-gradients-fusion",
        fields=("fuse_gradient_accumulation", "parallel_weight_gradients"),
        broken=lambda o: o.parallel_weight_gradients and not o.fuse_gradient_accumulation,
        what="--parallel-weight-gradients moves products that add weight gradients themselves, and there are none",
        fix="add --gradient-accumulation-fusion, or leave --parallel-weight-gradients out",
    ),
    Rule(
        code="full-iteration-modules",
        fields=("cuda_graph_impl", "cuda_graph_modules"),
        broken=lambda o: o.cuda_graph_impl == "full_iteration" and len(o.cuda_graph_modules) > 0,
        what="full_iteration captures everything: --cuda-graph-modules must be left out",
        fix="leave --cuda-graph-modules out, or use --cuda-graph-impl local",
    ),
    Rule(
        code="modules-need-experts",
        fields=("cuda_graph_impl", "cuda_graph_modules", "num_experts", "hybrid_layer_pattern"),
        blames=("cuda_graph_modules", "num_experts"),
        broken=lambda o: names_module(o, *_MOE) and not has_experts(o),
        details=_experts_to_add,
        what="modules moe, moe_router and moe_preprocess need experts, and this model has none to choose from",
        fix="add {experts}, or name only modules the model has, or leave --cuda-graph-modules out",
        fix_on_page="add --num-experts, or name only modules the model has, or leave --cuda-graph-modules out",
    ),
    Rule(
        code="preprocess-needs-router",
        fields=("cuda_graph_impl", "cuda_graph_modules"),
        broken=lambda o: names_module(o, "moe_preprocess") and "moe_router" not in o.cuda_graph_modules,
        details=lambda o: {
            "change": "leave moe_preprocess out" if "moe" in o.cuda_graph_modules else "name moe_router as well"
        },
        what="module moe_preprocess continues what moe_router begins, and moe_router is not captured",
        fix="{change}",
        fix_on_page="name moe_router as well; beside moe, leave moe_preprocess out",
    ),
    Rule(
        code="moe-beside-router",
        fields=("cuda_graph_impl", "cuda_graph_modules"),
        broken=lambda o: names_module(o, "moe") and "moe_router" in o.cuda_graph_modules,
        what="module moe covers the router: it cannot stand beside moe_router and moe_preprocess",
        fix="name moe, or moe_router and moe_preprocess",
    ),
    Rule(
        code="mlp-needs-dense-layers",
        fields=("cuda_graph_impl", "cuda_graph_modules", "num_experts", "layer_modules", "dynamic_experts"),
        blames=("cuda_graph_modules", "num_experts"),
        broken=lambda o: names_module(o, "mlp") and has_experts(o) and "mlp" not in o.layer_modules,
        details=modules_that_fit,
        what="module mlp means MLPs without experts, and this model has none",
        fix="{ways}",
        fix_on_page="name moe_router or moe instead, or leave --cuda-graph-modules out",
    ),
    Rule(
        code="modules-match-nothing",
        fields=(
            "cuda_graph_impl",
            "cuda_graph_modules",
            "inference_cuda_graph_scope",
            "num_experts",
            "layer_modules",
            "dynamic_experts",
        ),
        blames=("cuda_graph_modules",),
        broken=_matches_nothing,
        details=lambda o: {"named": " or ".join(dict.fromkeys(o.cuda_graph_modules)), **modules_that_fit(o)},
        what="nothing would be captured: no layer of this model has {named}",
        fix="{ways}",
        fix_on_page="name modules that the model has, or leave --cuda-graph-modules out to capture whole layers",
    ),
    *(_module_notice(module, layers) for module, layers in _LAYERS.items()),
    Rule(
        code="modules-completed",
        fields=("cuda_graph_impl", "cuda_graph_modules", "given_half_of_router"),
        broken=lambda o: o.cuda_graph_impl == "local" and bool(o.given_half_of_router),
        what="local captures moe_router and moe_preprocess together: the missing one was added",
        fix="name both",
        is_notice=True,
    ),
    no_effect(
        "modules-without-graphs",
        ("cuda_graph_impl", "cuda_graph_modules", "unmatched_modules"),
        lambda o: o.cuda_graph_impl == "none" and len(o.cuda_graph_modules) > 0 and not o.unmatched_modules,
        "--cuda-graph-modules has no effect with --cuda-graph-impl none: nothing is captured",
        "add --cuda-graph-impl local",
    ),
    no_effect(
        "wrong-modules-without-graphs",
        ("cuda_graph_impl", "cuda_graph_modules", "unmatched_modules"),
        lambda o: o.cuda_graph_impl == "none" and bool(o.unmatched_modules),
        "--cuda-graph-modules has no effect with --cuda-graph-impl none: nothing is captured; and this model has no "
        "layer for {unmatched_modules}",
        "leave {unmatched_modules} out, and add --cuda-graph-impl local",
    ),
    Rule(
        code="inference-scope-needs-local",
        fields=("cuda_graph_impl", "inference_cuda_graph_scope"),
        broken=lambda o: o.inference_cuda_graph_scope != "none" and o.cuda_graph_impl != "local",
        what="only --cuda-graph-impl local makes inference graphs: {cuda_graph_impl} has scope none, not "
        "{inference_cuda_graph_scope}",
        fix="use --cuda-graph-impl local, or leave --inference-cuda-graph-scope out",
    ),
    Rule(
        code="inference-scope-none",
        fields=("cuda_graph_impl", "inference_cuda_graph_scope"),
        broken=lambda o: o.inference_cuda_graph_scope == "none" and o.cuda_graph_impl == "local",
        what="--cuda-graph-impl local makes inference graphs of a layer or of the block, never none",
        fix="use layer or block, or leave --inference-cuda-graph-scope out",
    ),
    Rule(
        code="warmup-zero",
        fields=("cuda_graph_impl", "cuda_graph_warmup_steps"),
        broken=lambda o: o.cuda_graph_impl != "none" and o.cuda_graph_warmup_steps == 0,
        what="without warmup, libraries set themselves up inside the capture",
        fix="use --cuda-graph-warmup-steps 3 if the capture fails",
        is_notice=True,
    ),
    no_effect(
        "warmup-without-graphs",
        ("cuda_graph_impl", "cuda_graph_warmup_steps", "optimizer_cuda_graph"),
        lambda o: o.cuda_graph_impl == "none" and not o.optimizer_cuda_graph and o.cuda_graph_warmup_steps != 3,
        "--cuda-graph-warmup-steps has no effect: nothing is captured",
        "add --cuda-graph-impl local or full_iteration, or leave it out",
    ),
    no_effect(
        "pool-without-effect",
        ("cuda_graph_impl", "cuda_graph_use_single_mempool", "optimizer_cuda_graph"),
        lambda o: (
            not o.cuda_graph_use_single_mempool and o.cuda_graph_impl != "full_iteration" and not o.optimizer_cuda_graph
        ),
        "--no-cuda-graph-use-single-mempool has an effect only on full_iteration and the optimizer graph",
        "leave it out",
    ),
    no_effect(
        "retain-without-effect",
        ("cuda_graph_impl", "cuda_graph_retain_backward_graph"),
        lambda o: o.cuda_graph_retain_backward_graph and not captures_by_module(o),
        "--cuda-graph-retain-backward-graph has an effect only on local and transformer_engine",
        "leave it out",
    ),
    *idle(
        ("cuda_graph_policy",),
        ("cuda_graph_impl",),
        lambda o: o.cuda_graph_impl == "none" and not o.optimizer_cuda_graph,
        "--cuda-graph-impl none captures nothing",
        "add --cuda-graph-impl local, or leave it out",
    ),
    no_effect(
        "policy-without-effect",
        ("cuda_graph_impl", "cuda_graph_policy"),
        lambda o: o.cuda_graph_impl == "transformer_engine" and o.cuda_graph_policy == "auto",
        "--cuda-graph-policy {cuda_graph_policy} has no effect yet with --cuda-graph-impl {cuda_graph_impl}: it "
        "captures, and what cannot be captured is an error",
        "leave it out, or use --cuda-graph-impl local",
    ),
    no_effect(
        "policy-off",
        ("cuda_graph_impl", "cuda_graph_policy", "optimizer_cuda_graph"),
        lambda o: o.cuda_graph_policy == "off" and (o.cuda_graph_impl != "none" or o.optimizer_cuda_graph),
        "with --cuda-graph-policy off nothing is captured, and the other options of CUDA graphs have no effect",
        "use --cuda-graph-policy auto or required to capture",
    ),
    *idle(
        ("cuda_graph_on_mismatch", "cuda_graph_max_signatures"),
        ("cuda_graph_impl",),
        lambda o: o.cuda_graph_impl == "none",
        "--cuda-graph-impl none captures nothing",
        "add --cuda-graph-impl local, or leave it out",
    ),
    *idle(
        ("cuda_graph_capture_after",),
        ("cuda_graph_impl",),
        lambda o: o.cuda_graph_impl != "local",
        "it is an option of --cuda-graph-impl local",
        "use --cuda-graph-impl local, or leave it out",
    ),
    *idle(
        ("cuda_graph_merge_layers", "cuda_graph_debug"),
        ("cuda_graph_impl",),
        lambda o: not captures_by_module(o),
        "it is an option of --cuda-graph-impl local and transformer_engine",
        "use one of these, or leave it out",
    ),
    no_effect(
        "recapture-without-effect",
        ("cuda_graph_impl", "cuda_graph_on_mismatch", "given_cuda_graph_on_mismatch"),
        lambda o: (
            o.given_cuda_graph_on_mismatch
            and o.cuda_graph_impl == "transformer_engine"
            and o.cuda_graph_on_mismatch == "recapture"
        ),
        "--cuda-graph-on-mismatch recapture has no effect with --cuda-graph-impl transformer_engine: its graphs are "
        "those of the first capture, and other calls run eagerly",
        "use eager or error, or leave it out",
    ),
    no_effect(
        "one-signature-without-effect",
        ("cuda_graph_impl", "cuda_graph_max_signatures"),
        lambda o: o.cuda_graph_impl == "full_iteration" and o.cuda_graph_max_signatures == 1,
        "--cuda-graph-max-signatures 1 is taken as 2 with --cuda-graph-impl full_iteration: training and validation "
        "have a graph each",
        "use 2 or more",
    ),
    no_effect(
        "capture-after-without-recapture",
        (
            "cuda_graph_capture_after",
            "given_cuda_graph_capture_after",
            "cuda_graph_on_mismatch",
            "cuda_graph_impl",
        ),
        lambda o: (
            o.given_cuda_graph_capture_after
            and o.cuda_graph_impl == "local"
            and o.cuda_graph_on_mismatch != "recapture"
        ),
        "--cuda-graph-capture-after has no effect with --cuda-graph-on-mismatch {cuda_graph_on_mismatch}: what the "
        "first step has not seen is never captured",
        "use --cuda-graph-on-mismatch recapture, or leave it out",
    ),
    Rule(
        code="full-iteration-host-reads",
        fields=(
            "cuda_graph_impl",
            "check_for_spiky_loss",
            "check_for_large_grads",
            "log_num_zeros_in_grad",
            "timing_log_level",
        ),
        broken=lambda o: (
            o.cuda_graph_impl == "full_iteration"
            and bool(
                o.check_for_spiky_loss or o.check_for_large_grads or o.log_num_zeros_in_grad or o.timing_log_level > 0
            )
        ),
        what="checks and timers that read back from the device cannot run inside the graph of full_iteration",
        fix="leave them out if the capture fails",
        is_notice=True,
    ),
    Rule(
        code="optimizer-graph-host-reads",
        fields=("optimizer_cuda_graph", "optimizer", "fp16", "optimizer_cpu_offload", "log_num_zeros_in_grad"),
        broken=lambda o: (
            o.optimizer_cuda_graph
            and bool(o.fp16 or o.optimizer_cpu_offload or o.log_num_zeros_in_grad or o.optimizer != "adam")
        ),
        what="only Adam without loss scaling, CPU offload and counting of zeros runs without reading back to the host: "
        "the optimizer graph may not be captured",
        fix="leave --optimizer-cuda-graph out if the capture fails",
        is_notice=True,
    ),
)
