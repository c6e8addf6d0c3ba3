"""Rules about what is captured."""

from __future__ import annotations

from typing import Any

from graphstep.config.rules.rule import Rule, at_least, no_effect

_MOE = ("moe", "moe_router", "moe_preprocess")


def _by_module(options: Any) -> bool:
    return options.cuda_graph_impl in ("local", "transformer_engine")


def _unmatched(options: Any) -> list[str]:
    return [module for module in options.cuda_graph_modules if module not in options.layer_modules]


GRAPH_RULES: tuple[Rule, ...] = (
    at_least(0, "cuda_graph_warmup_steps", "use 3"),
    Rule(
        code="full-iteration-nan-check",
        fields=("cuda_graph_impl", "check_for_nan_in_loss_and_grad"),
        broken=lambda o: o.cuda_graph_impl == "full_iteration" and o.check_for_nan_in_loss_and_grad,
        what="full_iteration cannot look for NaN in loss and gradients: reading a value inside the graph is impossible",
        fix="add --no-check-for-nan-in-loss-and-grad",
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
        fields=("cuda_graph_impl", "cuda_graph_modules", "layer_modules"),
        broken=lambda o: _by_module(o) and any(module in _MOE for module in _unmatched(o)),
        what="modules moe, moe_router and moe_preprocess need experts, and this model has none",
        fix="name only attn and mlp, or leave --cuda-graph-modules out to capture whole layers",
    ),
    Rule(
        code="modules-match-nothing",
        fields=("cuda_graph_impl", "cuda_graph_modules", "layer_modules"),
        broken=lambda o: _by_module(o) and set(o.cuda_graph_modules) == {"mamba"} and bool(_unmatched(o)),
        what="nothing would be captured: module mamba needs Mamba layers, and this model has none",
        fix="name attn or mlp, or leave --cuda-graph-modules out to capture whole layers",
    ),
    no_effect(
        "module-matches-nothing",
        ("cuda_graph_impl", "cuda_graph_modules", "layer_modules"),
        lambda o: _by_module(o) and set(o.cuda_graph_modules) > {"mamba"} and "mamba" in _unmatched(o),
        "module mamba matches no layer: this model has no Mamba layers",
        "leave mamba out of --cuda-graph-modules",
    ),
    no_effect(
        "modules-without-graphs",
        ("cuda_graph_impl", "cuda_graph_modules"),
        lambda o: o.cuda_graph_impl == "none" and len(o.cuda_graph_modules) > 0,
        "--cuda-graph-modules has no effect with --cuda-graph-impl none: nothing is captured",
        "add --cuda-graph-impl local",
    ),
    Rule(
        code="inference-scope-needs-local",
        fields=("cuda_graph_impl", "inference_cuda_graph_scope", "given_inference_cuda_graph_scope"),
        broken=lambda o: (
            o.given_inference_cuda_graph_scope
            and o.inference_cuda_graph_scope != "none"
            and o.cuda_graph_impl != "local"
        ),
        what="only --cuda-graph-impl local makes inference graphs: {cuda_graph_impl} has scope none, not "
        "{inference_cuda_graph_scope}",
        fix="use --cuda-graph-impl local, or leave --inference-cuda-graph-scope out",
    ),
    Rule(
        code="inference-scope-none",
        fields=("cuda_graph_impl", "inference_cuda_graph_scope", "given_inference_cuda_graph_scope"),
        broken=lambda o: (
            o.given_inference_cuda_graph_scope
            and o.inference_cuda_graph_scope == "none"
            and o.cuda_graph_impl == "local"
        ),
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
        lambda o: o.cuda_graph_retain_backward_graph and not _by_module(o),
        "--cuda-graph-retain-backward-graph has an effect only on local and transformer_engine",
        "leave it out",
    ),
    Rule(
        code="not-available-transformer-engine",
        fields=("cuda_graph_impl",),
        broken=lambda o: o.cuda_graph_impl == "transformer_engine",
        what="--cuda-graph-impl transformer_engine is not available yet in graphstep train",
        fix="use --cuda-graph-impl local or full_iteration",
        for_training=True,
    ),
    Rule(
        code="not-available-optimizer-graph",
        fields=("optimizer_cuda_graph",),
        broken=lambda o: o.optimizer_cuda_graph,
        what="--optimizer-cuda-graph is not available yet in graphstep train",
        fix="leave it out: the optimizer step runs eagerly",
        for_training=True,
    ),
    Rule(
        code="not-available-retain",
        fields=("cuda_graph_impl", "cuda_graph_retain_backward_graph"),
        broken=lambda o: o.cuda_graph_retain_backward_graph and _by_module(o),
        what="--cuda-graph-retain-backward-graph is not available yet in graphstep train",
        fix="leave it out",
        for_training=True,
    ),
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
