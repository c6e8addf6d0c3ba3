"""What a training loop does with the counters of routers: move biases of experts after a step, and log losses."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from graphstep.models.moe.router import TopKRouter


def routers(model: nn.Module) -> tuple[TopKRouter, ...]:
    """The routers of a model, in the order of its layers."""
    return tuple(module for module in model.modules() if isinstance(module, TopKRouter))


@torch.no_grad()
def update_expert_biases(model: nn.Module, rate: float, skip: Tensor | None = None) -> None:
    """End a step of the optimizer: move the biases of experts towards a balanced load, and set the counts to zero.

    A bias rises by ``rate`` if its expert had fewer tokens than the mean, and falls if it had more. Routers without
    biases only forget their counts, which a balancing loss over the global batch is made of.

    Args:
        model: with routers.
        rate: how far a bias moves.
        skip: scalar on the device; where it is 1, the biases stay as they are.

    Cost: five small kernels a router, on the device only; may be part of a graph.
    Source: DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2; Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing
    Strategy for Mixture-of-Experts", algorithm 1.
    """
    for router in routers(model):
        counts_E = router.tokens_per_expert
        if counts_E is None:
            continue
        if router.expert_bias is not None:
            signs_E = torch.sign(counts_E.mean() - counts_E)
            router.expert_bias.add_(signs_E if skip is None else signs_E * (1.0 - skip), alpha=rate)
        counts_E.zero_()


@torch.no_grad()
def read_and_reset_losses(model: nn.Module) -> Mapping[str, Tensor]:
    """Mean balancing and z-losses, before their coefficients, since the last call; then forget them.

    Returns:
        Scalars of the device, ``load_balancing_loss`` and ``z_loss``, averaged over layers and forwards. A loss that
        no router has is missing.
    """
    sums: dict[str, list[Tensor]] = {}
    for router in routers(model):
        means = router.losses[:2] / router.losses[2].clamp(min=1.0)
        for name, mean, is_there in zip(
            ("load_balancing_loss", "z_loss"), means, (router.has_balancing_loss, router.has_z_loss), strict=True
        ):
            if is_there:
                sums.setdefault(name, []).append(mean)
        router.losses.zero_()
    return {name: torch.stack(means).mean() for name, means in sums.items()}
