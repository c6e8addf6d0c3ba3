"""Values that are worked out from others when they are left out, and facts about the model and the ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from graphstep.config.choices import OFFLOAD_MODULES, RECOMPUTE_MODULES
from graphstep.config.layer_freq import MAX_LAYERS, moe_layers
from graphstep.config.layer_pattern import is_layer_pattern, pattern_layers
from graphstep.config.static_experts import dynamic_experts

EXPERT_MODULES = frozenset({"moe", "moe_router", "moe_preprocess"})
_MODULES_OF_LAYER: Mapping[str, frozenset[str]] = {
    "M": frozenset({"mamba"}),
    "*": frozenset({"attn"}),
    "-": frozenset({"mlp"}),
    "E": EXPERT_MODULES,
}


def derived_options(options: Mapping[str, Any], skip: Collection[str] = ()) -> dict[str, Any]:
    """Return the values of those options that are 0, by name, where the options they are worked out from are known.

    Args:
        options: values by name; 0 stands for one that was left out.
        skip: names that cannot be computed with.
    """
    found: dict[str, Any] = {}
    for name, (sources, work_out) in DERIVED.items():
        if name not in skip and options.get(name) == 0 and all(s in options and s not in skip for s in sources):
            found[name] = work_out(*(options[source] for source in sources))
    return found


def underivable(options: Mapping[str, Any], derived: Collection[str]) -> set[str]:
    """Return the options that were left out and could not be worked out, because their sources are wrong."""
    return {name for name in DERIVED if options.get(name) == 0 and name not in derived}


def implied_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that options have when they are left out and these others are given.

    Args:
        options: all values by name.
    """
    found: dict[str, Any] = {}
    pattern = options["hybrid_layer_pattern"]
    if pattern is not None and is_layer_pattern(pattern):
        found["num_layers"] = len(pattern_layers(pattern))
    trains_whole_iterations = options["cuda_graph_impl"] == "full_iteration" and not options["skip_train"]
    looks_itself = options["fp16"] and options["loss_scale"] is None
    if (looks_itself or options["fake_process_group"]) and not trains_whole_iterations:
        found["check_for_nan_in_loss_and_grad"] = False
    if options["use_transformer_engine_op_fuser"] and options["moe_grouped_gemm"]:
        found["moe_use_grouped_tensor"] = True
    if options["use_megatron_fsdp"] and options["cuda_graph_impl"] != "none":
        found["megatron_fsdp_cuda_graph_mode"] = True
    return found


def complete_modules(impl: str, modules: Collection[str]) -> tuple[str, ...]:
    """Return the modules that are captured: ``local`` cannot tell router and preprocessing apart."""
    found = list(dict.fromkeys(modules))
    if impl == "local" and {"moe_router", "moe_preprocess"}.intersection(found):
        found += [module for module in ("moe_router", "moe_preprocess") if module not in found]
    return tuple(found)


def layer_modules(options: Mapping[str, Any]) -> frozenset[str]:
    """Return the parts that the layers of the model have, by the names of ``--cuda-graph-modules``.

    Args:
        options: values by name.
    """
    pattern = options["hybrid_layer_pattern"]
    if pattern is not None:
        parts = (_MODULES_OF_LAYER.get(letter, frozenset[str]()) for letter in set(pattern_layers(pattern)))
        return frozenset[str]().union(*parts)
    if options["num_experts"] is None:
        return frozenset({"attn", "mlp"})
    has_experts = moe_layers(options["moe_layer_freq"], min(options["num_layers"], MAX_LAYERS))
    dense = frozenset({"mlp"}) if not all(has_experts) else frozenset[str]()
    return frozenset({"attn"}) | dense | (EXPERT_MODULES if any(has_experts) else frozenset())


def has_expert_layers(options: Mapping[str, Any], modules: Collection[str]) -> bool:
    """Has the model layers with experts? An E in a pattern is one, also where their number is missing.

    Args:
        options: values by name.
        modules: parts of its layers.
    """
    return "moe" in modules


def model_facts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what rules look at and what is no option, as far as it follows from the options.

    Args:
        options: all values by name.
    """
    modules = layer_modules(options)
    has_experts = has_expert_layers(options, modules)
    return {
        "layer_modules": modules,
        "has_expert_layers": has_experts,
        "parts_beside_experts": " ".join(module for module in ("attn", "mlp", "mamba") if module in modules),
        "dynamic_experts": dynamic_experts(options) if has_experts else "",
        "unmatched_modules": unknown_words(options["cuda_graph_modules"], modules),
        "unknown_recompute_modules": unknown_words(options["recompute_modules"], RECOMPUTE_MODULES),
        "unknown_offload_modules": unknown_words(options["offload_modules"], OFFLOAD_MODULES),
    }


def rank_facts(options: Mapping[str, Any], world_size: int) -> dict[str, Any]:
    """Return what rules look at and what is no option, as far as it follows from the number of ranks."""
    return {
        "ranks_of_a_replica": ranks_of_a_replica(options),
        "data_parallel_size": data_parallel_size(options, world_size),
        "communicates_in_graphs": communicates_in_graphs(options, world_size),
    }


def unknown_words(words: Collection[str] | None, known: Collection[str]) -> str:
    """Return those that are not known, separated by commas."""
    return ", ".join(sorted({word for word in words or () if word not in known}))


def ranks_of_a_replica(options: Mapping[str, Any]) -> int:
    """Return the ranks that share one copy of the model, at least 1."""
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    product = max(options["tensor_parallel_num_weight_shards"], 1)
    for name in sizes:
        product *= max(options[name], 1)
    return int(product)


def data_parallel_size(options: Mapping[str, Any], world_size: int) -> int:
    """Return the number of copies of the model, at least 1."""
    return max(world_size // ranks_of_a_replica(options), 1)


def default_global_batch_size(options: Mapping[str, Any], world_size: int) -> int:
    """Return the global batch size when it is left out: one microbatch for each copy of the model."""
    return int(options["micro_batch_size"]) * data_parallel_size(options, world_size)


def communicates_in_graphs(options: Mapping[str, Any], world_size: int) -> bool:
    """Do ranks talk to each other inside a graph? Gradients of ``local`` are reduced outside of them."""
    if world_size <= 1 or options["cuda_graph_impl"] == "none":
        return False
    inside = ("tensor_model_parallel_size", "context_parallel_size", "tensor_parallel_num_weight_shards")
    modules = options["cuda_graph_modules"]
    has_experts = options["expert_model_parallel_size"] > 1 and (not modules or "moe" in modules)
    return options["cuda_graph_impl"] == "full_iteration" or any(options[n] > 1 for n in inside) or has_experts


def padded_vocab_size(vocab_size: int, multiple: int) -> int:
    """Return ``vocab_size`` rounded up to a multiple."""
    return (vocab_size + multiple - 1) // multiple * multiple


def _kv_channels(hidden_size: int, num_attention_heads: int) -> int:
    """Return the channels of a head, or 0 where the heads do not divide the hidden size: a rule says so."""
    if num_attention_heads < 1 or hidden_size % num_attention_heads:
        return 0
    return hidden_size // num_attention_heads


def _ffn_hidden_size(hidden_size: int, swiglu: bool) -> int:
    """Return the width of the MLP. SwiGLU has three matrices: 2/3 of the width keeps the parameters (Shazeer 2020)."""
    return max(64, 8 * hidden_size // 3 // 64 * 64) if swiglu else 4 * hidden_size


def _same(value: int) -> int:
    return value


DERIVED: Mapping[str, tuple[tuple[str, ...], Callable[..., int]]] = {
    "num_query_groups": (("num_attention_heads",), _same),
    "kv_channels": (("hidden_size", "num_attention_heads"), _kv_channels),
    "ffn_hidden_size": (("hidden_size", "swiglu"), _ffn_hidden_size),
    "max_position_embeddings": (("seq_length",), _same),
    "global_batch_size": (("micro_batch_size",), _same),
    "lr_decay_iters": (("train_iters",), _same),
}
"""Option -> the options it is worked out from, and how."""
