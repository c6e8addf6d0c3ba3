"""Stop a run whose numbers are no longer finite, and name the iteration."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graphstep.errors import NonFiniteError


def require_finite(losses: Tensor, grad_norm: Tensor, iteration: int, *, is_clipped: bool) -> None:
    """Raise if a loss or the gradient norm is not finite. Reads both back to the host, in one copy.

    Args:
        losses: [num_microbatches] fp32.
        grad_norm: scalar, fp32.
        iteration: number of the step, counted from 1.
        is_clipped: the gradient is clipped: advise to clip more; otherwise to clip.

    Raises:
        NonFiniteError: names what is not finite.
    """
    *loss_values, norm = torch.cat((losses, grad_norm.reshape(1))).tolist()
    bad = [f"the loss of microbatch {i} is {value}" for i, value in enumerate(loss_values) if not math.isfinite(value)]
    if not math.isfinite(norm):
        bad.append(f"the gradient norm is {norm}")
    if bad:
        clip = "lower --clip-grad" if is_clipped else "clip gradients with --clip-grad 1.0"
        raise NonFiniteError(
            f"{', '.join(bad)}",
            where=f"iteration {iteration}; the weights were not updated",
            fix=f"lower --lr, lengthen --lr-warmup-iters, {clip}, or check the data of this iteration",
        )
