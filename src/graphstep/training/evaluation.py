"""Validation loss, without a trace in the training run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from graphstep.strategies.protocol import Strategy
from graphstep.training.determinism import preserved_random_state


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules into eval mode; each gets its own former mode back."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        # Module by module: train() on the model would also wake modules that someone had frozen.
        for module in training:
            module.training = True


def evaluate(
    strategy: Strategy,
    model: nn.Module,
    batches: Iterator[Mapping[str, Tensor]],
    *,
    num_iters: int,
    num_microbatches: int,
    device: torch.device,
) -> float:
    """Return the mean loss over ``num_iters * num_microbatches`` batches.

    Runs in eval mode and without gradients through the strategy; modes and default generators are afterwards as before.

    Cost: one host read at the end.
    """
    with evaluation_mode(model), torch.no_grad(), preserved_random_state(device):
        losses = [
            strategy.forward_backward(data_iterator=batches, num_microbatches=num_microbatches, forward_only=True)
            for _ in range(num_iters)
        ]
    return float(torch.cat(losses).double().mean())
