"""Experts in inference: no choice is ever dropped, so that a token's result does not depend on the others of its step.

Shapes: T tokens, H hidden, K experts of a token, E experts.
"""

from __future__ import annotations

from torch import Tensor

from graphstep.errors import ConfigError, Problem
from graphstep.models.moe import GroupedExperts, MoEBlock, PaddedExperts
from graphstep.models.moe.experts import reads_on_host
from graphstep.models.moe.permutation import combine, permute, row_order, row_order_padded


def experts_problem(block: MoEBlock, where: str) -> Problem | None:
    """Why a block cannot run here, or ``None``."""
    num_ranks = block.dispatcher.num_ranks
    if num_ranks == 1:
        return None
    return Problem(
        code="inference-expert-ranks",
        what=f"experts spread over {num_ranks} ranks cannot be run by this engine",
        where=where,
        fix="load the model with --expert-model-parallel-size 1",
    )


def run_experts(block: MoEBlock, x_TH: Tensor, *, is_captured: bool) -> Tensor:
    """What `MoEBlock.forward` computes where its experts have no capacity; a capacity is not looked at.

    Args:
        block: router, experts, shared experts; on one rank.
        x_TH: normalised hidden states.
        is_captured: nothing may be read on the host. Experts that would are given the rows of all tokens each: E / K
            times the products, which is little where a step has few tokens.

    Raises:
        ConfigError: the experts lie on several ranks.
    """
    problem = experts_problem(block, "MoEBlock")
    if problem is not None:
        raise ConfigError(problem)
    experts, num_experts = block.experts, block.router.num_experts
    probs_TK, experts_TK = block.router(x_TH)
    if pads_experts(block, x_TH, is_captured=is_captured):
        order = row_order_padded(experts_TK, probs_TK, num_experts, x_TH.shape[0], "position")
        y_NH = experts.forward_padded(permute(x_TH, order))
    else:
        order = row_order(experts_TK, num_experts)
        y_NH = experts(permute(x_TH, order), order.ends)
    y_TH = combine(y_NH, probs_TK, order)
    return y_TH if block.shared_experts is None else y_TH + block.shared_experts(x_TH)


def pads_experts(block: MoEBlock, x_TH: Tensor, *, is_captured: bool) -> bool:
    """Does every expert get the rows of all tokens?"""
    experts = block.experts
    if isinstance(experts, PaddedExperts):
        return True
    if is_captured and block.dispatcher.moe.moe_pad_experts_for_cuda_graph_inference:
        return True
    is_static = isinstance(experts, GroupedExperts) and not reads_on_host(x_TH, experts.up, experts.down)
    return is_captured and not is_static
