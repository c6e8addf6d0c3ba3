"""Forward and backward of one training step without pipelining: microbatch after microbatch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


def forward_backward_no_pipelining(
    *,
    data_iterator: Iterator[Mapping[str, Tensor]],
    model: nn.Module,
    num_microbatches: int,
    forward_only: bool = False,
) -> Tensor:
    """Run the microbatches of one step and add their gradients to what ``.grad`` or ``main_grad`` holds.

    The caller zeroes the gradients before and updates the weights after. Nothing is read back to the host, so that the
    whole call can be captured.

    Args:
        data_iterator: gives batches on the model's device: ``tokens`` and ``labels``, int64 [B, S].
        model: ``model(tokens, labels)`` is the mean loss, a scalar; its mode (train or eval) is left alone.
        num_microbatches: batches to take, >= 1; the gradient is that of the mean of their losses.
        forward_only: run under ``no_grad`` and leave the gradients alone.

    Returns:
        [num_microbatches] fp32, detached: the loss of each microbatch.
    """
    losses: list[Tensor] = []
    for _ in range(num_microbatches):
        batch = next(data_iterator)
        with torch.no_grad() if forward_only else contextlib.nullcontext():
            loss: Tensor = model(batch["tokens"], batch["labels"])
            if not forward_only:
                (loss / num_microbatches).backward()
        losses.append(loss.detach().float())
    return torch.stack(losses)
