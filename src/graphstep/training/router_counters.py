"""What a training step does with the counters of routers: biases of experts after it, losses for the logs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from graphstep.models.moe import read_and_reset_losses, routers, update_expert_biases


class RouterCounters:
    """Counters of all routers of a model. Without routers nothing is done.

    Args:
        model: its routers are looked up once, so that a step does not walk over all modules.
        rate: how far the bias of an expert moves in a step.
    """

    def __init__(self, model: nn.Module, rate: float) -> None:
        self._routers = nn.ModuleList(routers(model))
        self._rate = rate

    def end_step(self, skip: Tensor | None = None) -> None:
        """Move the biases of experts towards a balanced load, and forget the counts. May be part of a graph.

        Args:
            skip: scalar on the device; where it is 1, biases stay as they are.
        """
        if len(self._routers):
            update_expert_biases(self._routers, self._rate, skip)

    def read_losses(self) -> dict[str, float]:
        """Mean losses of the routers since the last call, before their coefficients, by name. Waits for the device."""
        means = read_and_reset_losses(self._routers)
        if not means:
            return {}
        return dict(zip(means, torch.stack(tuple(means.values())).tolist(), strict=True))
