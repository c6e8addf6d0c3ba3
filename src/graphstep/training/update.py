"""The part of a training step after backward: gradient norm, clipping, AdamW. And the whole step in one function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from graphstep.models.weight_gradients import WeightGradients
from graphstep.strategies import ForwardBackward
from graphstep.training.gradients import GradientBuffers
from graphstep.training.health import HealthRecord
from graphstep.training.optimizer import MainWeightAdamW
from graphstep.training.router_counters import RouterCounters


class Update:
    """Norm, clipping and update of the weights, as functions without arguments that read nothing back.

    Args:
        gradients: what is clipped and used.
        optimizer: what updates.
        clip_grad: largest norm, 0 for no clipping.
        health: notes norms, if given; a step in which something is not finite then leaves the weights as they are.
        counters: of the routers, if given: their step ends with that of the weights.
    """

    def __init__(
        self,
        gradients: GradientBuffers,
        optimizer: MainWeightAdamW,
        *,
        clip_grad: float,
        health: HealthRecord | None = None,
        counters: RouterCounters | None = None,
    ) -> None:
        self._gradients = gradients
        self._optimizer = optimizer
        self._counters = counters
        self._clip_grad = clip_grad
        self._health = health
        self.norm = torch.zeros((), dtype=torch.float32, device=gradients.device)
        """Norm of all gradients of the last step, before clipping: a scalar on the device, overwritten by the next."""

    def measure(self) -> None:
        """Work out the norm."""
        if self._health is None:
            self.norm.copy_(self._gradients.norm())
        else:
            norms = self._gradients.norms()
            self._health.note_norms(norms)
            self.norm.copy_(torch.linalg.vector_norm(norms))

    def apply(self) -> None:
        """Clip by the norm, and update the weights and the biases of experts."""
        divisor = self._gradients.clip_divisor(self.norm, self._clip_grad) if self._clip_grad > 0 else None
        skip = None if self._health is None else self._health.is_bad()
        self._optimizer.update(divisor, skip)
        if self._counters is not None:
            self._counters.end_step(skip)

    def __call__(self) -> None:
        """Both."""
        self.measure()
        self.apply()


class Joined:
    """A forward-backward function after which the weight gradients of a parallel branch are there.

    Args:
        forward_backward: of all microbatches.
        gradients: owner of the branch.
    """

    def __init__(self, forward_backward: ForwardBackward, gradients: WeightGradients) -> None:
        self._forward_backward = forward_backward
        self._gradients = gradients

    def __call__(
        self, *, data_iterator: Iterator[Any], model: nn.Module, num_microbatches: int, forward_only: bool = False
    ) -> Tensor:
        """Losses of the microbatches [num_microbatches]."""
        losses = self._forward_backward(
            data_iterator=data_iterator, model=model, num_microbatches=num_microbatches, forward_only=forward_only
        )
        self._gradients.join()
        return losses


class WholeStep:
    """Zeroing, forward, backward and update as one forward-backward function, to be captured as one graph.

    Args:
        forward_backward: of all microbatches.
        gradients: zeroed first.
        update: run last.
        health: notes the losses, if given.
    """

    def __init__(
        self,
        forward_backward: ForwardBackward,
        gradients: GradientBuffers,
        update: Update,
        health: HealthRecord | None,
    ) -> None:
        self._forward_backward = forward_backward
        self._gradients = gradients
        self._update = update
        self._health = health

    def __call__(
        self, *, data_iterator: Iterator[Any], model: nn.Module, num_microbatches: int, forward_only: bool = False
    ) -> Tensor:
        """Losses of the microbatches [num_microbatches]; with ``forward_only`` that is all."""
        if not forward_only:
            self._gradients.zero()
        losses = self._forward_backward(
            data_iterator=data_iterator, model=model, num_microbatches=num_microbatches, forward_only=forward_only
        )
        if not forward_only:
            if self._health is not None:
                self._health.note_losses(losses)
            self._update()
        return losses
