"""Formulas that keep the load of experts even.

Shapes: T tokens, B sequences, E experts, K experts of a token.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

NUM_SINKHORN_STEPS: Final = 8
"""Fixed, because a graph cannot stop when a tolerance is met."""


def chosen_map(experts_TK: Tensor, num_experts: int) -> Tensor:
    """float32 [T, E]: 1 where the token goes to the expert."""
    chosen_TE = torch.zeros(experts_TK.shape[0], num_experts, device=experts_TK.device)
    return chosen_TE.scatter_(1, experts_TK, 1.0)


def load_balancing_loss(scores_BSE: Tensor, counts_BE: Tensor, top_k: int) -> tuple[Tensor, float]:
    """E * sum over experts of (share of the choices) * (mean score), averaged over the B groups of tokens.

    It is 1 for a balanced load, and its gradient lowers the scores of experts that have more than their share.

    Args:
        scores_BSE: of all experts, those of a token adding up to 1.
        counts_BE: choices of each group for each expert, adding up to S * K; without gradient.
        top_k: K.

    Returns:
        The loss without its constant factor, and that factor: whoever scales it anyway saves a kernel.

    Source: Fedus et al. 2021, "Switch Transformers", equations 4 to 6 (one group: all tokens); DeepSeek-AI 2024,
    "DeepSeek-V3", equations 17 to 20 (a group is a sequence).
    """
    num_groups, num_tokens, num_experts = scores_BSE.shape
    return (scores_BSE.sum(1) * counts_BE).sum(), num_experts / (num_groups * top_k * num_tokens**2)


def z_loss(logits_TE: Tensor) -> tuple[Tensor, float]:
    """Mean over tokens of the squared log of the sum of exponentials of the logits, and its factor, as above.

    Source: Zoph et al. 2022, "ST-MoE", equation 5.
    """
    return torch.logsumexp(logits_TE, dim=-1).square().sum(), 1.0 / logits_TE.shape[0]


def sinkhorn(logits_TE: Tensor) -> Tensor:
    """Scores [T, E] for the choice, in logs: rows and columns of their exponentials add up to about the same.

    Source: Clark et al. 2022, "Unified Scaling Laws for Routed Language Models", appendix B.1 (S-BASE).
    """
    plan_TE = logits_TE
    for _ in range(NUM_SINKHORN_STEPS):
        plan_TE = torch.log_softmax(torch.log_softmax(plan_TE, dim=0), dim=1)
    return plan_TE
