"""What to do where experts cannot be captured: the options that are missing, and what can be captured without them.

Each function takes an object with all values it looks at as attributes, and offers nothing that another rule refuses.
"""

from __future__ import annotations

from typing import Any

from graphstep.config.static_experts import reads_counts_on_the_host, width_multiple

MODULE_ORDER = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba")
"""The modules of ``--cuda-graph-modules`` as messages list them."""
STATIC_EXPERTS_ON_PAGE = (
    "add what is missing of --moe-grouped-gemm --disable-bias-linear --bf16 on one expert rank, or of "
    "--moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity, which drops tokens"
)
"""How experts become static, as the page of rules says it."""
PARTS_ON_PAGE = "capture parts of layers: --cuda-graph-impl local --cuda-graph-modules attn moe_router moe_preprocess"
"""What can be captured without them, likewise."""


def static_experts(options: Any) -> str:
    """Return what would make the experts static, of either way what is missing."""
    grouped = (
        ("--moe-grouped-gemm", not options.moe_grouped_gemm),
        ("--disable-bias-linear", options.add_bias_linear),
        ("--bf16", not options.bf16 and options.device != "cpu"),
        ("--moe-token-dispatcher-type alltoall", options.moe_token_dispatcher_type == "flex"),
        ("--expert-model-parallel-size 1", options.expert_model_parallel_size > 1),
    )
    padded = (
        ("--moe-expert-capacity-factor 1.0", options.moe_expert_capacity_factor is None),
        ("--moe-pad-expert-input-to-capacity", not options.moe_pad_expert_input_to_capacity),
    )
    without_drops, with_drops = (" ".join(word for word, is_missing in way if is_missing) for way in (grouped, padded))
    multiple = width_multiple(options)
    if options.hidden_size % multiple or (options.moe_ffn_hidden_size or options.ffn_hidden_size) % multiple:
        without_drops += f" with multiples of {multiple} for --hidden-size and --moe-ffn-hidden-size"
    if options.moe_router_load_balancing_type == "sinkhorn":  # It knows no capacity.
        return f"add {without_drops}"
    drops = ", which drops tokens" if options.moe_expert_capacity_factor is None else ""
    return f"add {without_drops}, or {with_drops}{drops}"


def router_parts(options: Any) -> str:
    """Return the modules of layers with experts that can be captured while the experts run eagerly."""
    if options.num_experts == 1:
        return ""
    if not reads_counts_on_the_host(options):
        return "moe_router moe_preprocess"
    # Preprocessing cannot, and local captures the router together with it.
    return "moe_router" if options.cuda_graph_impl == "transformer_engine" else ""


def ways_out(options: Any) -> dict[str, str]:
    """Return all that can be done about whole layers whose experts are not static: ``ways``."""
    is_whole = options.cuda_graph_impl == "full_iteration"
    ways = [static_experts(options)]
    modules = " ".join(filter(None, (options.parts_beside_experts, router_parts(options))))
    # Compiled layers, and those that add gradients themselves, have no graphs of their own.
    if modules and not (options.compile or options.fuse_gradient_accumulation):
        impl = " --cuda-graph-impl local" if is_whole else ""
        ways.append(f"capture parts of layers:{impl} --cuda-graph-modules {modules}")
    if options.cuda_graph_policy == "required" and options.cuda_graph_impl == "local":
        ways.append("let layers with experts run eagerly: --cuda-graph-policy auto")
    elif options.cuda_graph_policy == "auto" and options.cuda_graph_impl == "transformer_engine":
        ways[-1] += " (--cuda-graph-policy auto has no effect with transformer_engine)"
    return {"ways": "; or ".join(ways)}


def ways_for_module(options: Any) -> dict[str, str]:
    """Return the same where module ``moe`` is named."""
    ways = [static_experts(options)]
    if router_parts(options):
        ways.append("name moe_router, not moe")
    if options.cuda_graph_policy == "auto":
        ways[-1] += " (--cuda-graph-policy auto does not help: moe is named)"
    return {"ways": "; or ".join(ways)}


def modules_that_fit(options: Any) -> dict[str, str]:
    """Return modules to name instead, or not to name any, as far as the experts allow: ``ways``."""
    found = [module for module in MODULE_ORDER if module in options.layer_modules]
    if options.dynamic_experts:
        found = [module for module in found if module != "moe"]
    ways = [f"name some of {' '.join(found)}"] if found else []
    if not options.dynamic_experts:
        ways.append("leave --cuda-graph-modules out to capture whole layers")
    return {"ways": ", or ".join(ways)}
