"""Stop a run whose numbers are no longer finite, and name the iteration."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

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


class HealthRecord:
    """Losses and gradient norms of each step, looked at one step later, when the device is done with them.

    Nothing waits for the device: values are copied to the host beside the work of the next step. What writes them can
    be captured. A step in which something is not finite leaves the weights as they are, see :meth:`is_bad`.

    Args:
        names: of the parameters that have a gradient, in the order of their norms.
        num_microbatches: losses of a step.
        device: where steps run.
    """

    def __init__(self, names: Sequence[str], num_microbatches: int, device: torch.device) -> None:
        self._names = tuple(names)
        self._num_losses = num_microbatches
        self._values = torch.zeros(num_microbatches + len(names), dtype=torch.float32, device=device)
        self._sent: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()

    def note_losses(self, losses: Tensor) -> None:
        """Take in the losses of a step, [num_microbatches]."""
        self._values[: self._num_losses].copy_(losses)

    def note_norms(self, norms: Tensor) -> None:
        """Take in the gradient norms of a step, one a parameter."""
        self._values[self._num_losses :].copy_(norms)

    def is_bad(self) -> Tensor:
        """1 if something that was noted for this step is not finite, else 0: scalar, fp32, on the device."""
        return (~torch.isfinite(self._values).all()).float()

    def send(self, iteration: int) -> None:
        """Start the copy of this step's values to the host.

        Args:
            iteration: number of the step, counted from 1.
        """
        if self._values.device.type != "cuda":
            self._sent.append((iteration, self._values.clone(), None))
            return
        # Pinned memory comes from a cache that gives it out again only after the copy.
        host = torch.empty(self._values.shape, dtype=torch.float32, pin_memory=True)
        host.copy_(self._values, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._sent.append((iteration, host, event))

    def check(self, *, wait: bool = False, but_last: int = 0) -> None:
        """Look at the steps whose values have arrived.

        Args:
            wait: at the end of a run: look at all.
            but_last: steps at the end that are not looked at yet.

        Raises:
            NonFiniteError: names the iteration, and the microbatches and parameters that are not finite.
        """
        while len(self._sent) > but_last:
            iteration, values, event = self._sent[0]
            if event is not None and not event.query():
                if not wait:
                    return
                event.synchronize()
            self._sent.popleft()
            bad = [(index, value) for index, value in enumerate(values.tolist()) if not math.isfinite(value)]
            if bad:
                self._sent.clear()
                raise self._error(iteration, bad)

    def _error(self, iteration: int, bad: list[tuple[int, float]]) -> NonFiniteError:
        losses = [f"the loss of microbatch {i} is {value}" for i, value in bad if i < self._num_losses]
        norms = [(self._names[i - self._num_losses], value) for i, value in bad if i >= self._num_losses]
        texts = losses + [f"the gradient norm of {name} is {value}" for name, value in norms[:_MOST_NAMED]]
        if len(norms) > _MOST_NAMED:
            texts.append(f"and those of {len(norms) - _MOST_NAMED} more parameters are not finite")
        return NonFiniteError(
            ", ".join(texts),
            where=f"iteration {iteration}, noticed after the one after it; the weights were not updated in it",
            fix="lower --lr, lengthen --lr-warmup-iters, lower --clip-grad, or check the data of this iteration",
        )


_MOST_NAMED = 5
