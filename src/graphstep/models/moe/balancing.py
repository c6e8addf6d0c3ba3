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


def load_balancing_loss(scores_BSE: Tensor, shares_BE: Tensor) -> Tensor:
    """E * sum over experts of (share of the choices) * (mean score), averaged over the B groups of tokens.

    It is 1 for a balanced load, and its gradient lowers the scores of experts that have more than their share.

    Args:
        scores_BSE: of all experts, those of a token adding up to 1.
        shares_BE: of the choices of each group, adding up to 1; without gradient.

    Source: Fedus et al. 2021, "Switch Transformers", equations 4 to 6 (one group: all tokens); DeepSeek-AI 2024,
    "DeepSeek-V3", equations 17 to 20 (a group is a sequence).
    """
    num_experts = scores_BSE.shape[-1]
    return (scores_BSE.mean(1) * shares_BE).sum() * (num_experts / scores_BSE.shape[0])


def z_loss(logits_TE: Tensor) -> Tensor:
    """Mean over tokens of the squared log of the sum of exponentials of the logits.

    Source: Zoph et al. 2022, "ST-MoE", equation 5.
    """
    return torch.logsumexp(logits_TE, dim=-1).square().mean()


def sinkhorn(logits_TE: Tensor) -> Tensor:
    """Scores [T, E] for the choice, in logs: rows and columns of their exponentials add up to about the same.

    Source: Clark et al. 2022, "Unified Scaling Laws for Routed Language Models", appendix B.1 (S-BASE).
    """
    plan_TE = logits_TE
    for _ in range(NUM_SINKHORN_STEPS):
        plan_TE = torch.log_softmax(torch.log_softmax(plan_TE, dim=0), dim=1)
    return plan_TE
