"""Can the experts of a model be inside of a graph: are their shapes static, and is nothing read on the host?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def drops_and_pads(options: Mapping[str, Any]) -> bool:
    """Does every expert take a fixed number of tokens?"""
    return options["moe_expert_capacity_factor"] is not None and bool(options["moe_pad_expert_input_to_capacity"])


def dynamic_experts(options: Mapping[str, Any]) -> str:
    """Return what keeps experts out of graphs; empty if nothing does, or if that depends on the device alone.

    Experts that are padded to a capacity have static shapes, and drop tokens beyond it. So has one grouped matrix
    multiplication of all experts of one rank, with the rows of each on the device: it drops nothing without a capacity.

    Args:
        options: all values by name.
    """
    reasons = (
        (options["expert_model_parallel_size"] > 1, "ranks exchange numbers of tokens that they learn on the host"),
        (
            options["moe_token_dispatcher_type"] == "flex",
            "the flex dispatcher learns numbers of tokens on the host",
        ),
        (
            not options["moe_grouped_gemm"],
            "experts that run one after another learn their numbers of tokens on the host",
        ),
        (
            needs_half_precision(options) and options["device"] == "cuda",
            "the grouped matrix multiplication of a GPU reads its offsets on the host unless it is one of bf16",
        ),
    )
    return "" if drops_and_pads(options) else next((reason for holds, reason in reasons if holds), "")


def static_experts_advice(options: Any) -> str:
    """Return what would make the experts static: the options that are missing, of either way.

    Args:
        options: all values, as attributes.
    """
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
    drops = ", which drops tokens" if options.moe_expert_capacity_factor is None else ""
    return f"add {without_drops}, or {with_drops}{drops}"


def needs_half_precision(options: Mapping[str, Any]) -> bool:
    """Would the experts be static on a GPU if the parameters were bf16, and are they not?"""
    return not drops_and_pads(options) and bool(options["moe_grouped_gemm"]) and not options["bf16"]
