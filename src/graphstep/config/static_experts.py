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


def reads_counts_on_the_host(options: Any) -> bool:
    """Does preparing the dispatch read numbers of tokens on the host?

    Args:
        options: all values, as attributes.
    """
    return bool(
        options.moe_token_dispatcher_type == "alltoall"
        and not drops_and_pads(vars(options))
        and (options.moe_expert_capacity_factor is not None or options.moe_router_padding_for_quantization)
    )


def width_multiple(options: Any) -> int:
    """Return what the widths of a grouped product must be a multiple of.

    Rows of its matrices begin at multiples of 16 bytes; on a GPU it is one of bf16.

    Args:
        options: all values, as attributes.
    """
    return 8 if options.bf16 or options.device != "cpu" else 4


def needs_half_precision(options: Mapping[str, Any]) -> bool:
    """Would the experts be static on a GPU if the parameters were bf16, and are they not?"""
    return not drops_and_pads(options) and bool(options["moe_grouped_gemm"]) and not options["bf16"]
