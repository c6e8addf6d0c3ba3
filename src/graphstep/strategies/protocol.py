"""What a training loop sees of a strategy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor, nn

from graphstep.capture.report import CaptureReport


class ForwardBackward(Protocol):
    """Forward, and backward unless ``forward_only``, over the microbatches of one step."""

    def __call__(
        self, *, data_iterator: Iterator[Any], model: nn.Module, num_microbatches: int, forward_only: bool = False
    ) -> Tensor:
        """Losses of the microbatches [num_microbatches], fp32, detached. Gradients are accumulated."""


class Strategy(Protocol):
    """Runs forward and backward of a step, captured or not."""

    def forward_backward(
        self, *, data_iterator: Iterator[Any], num_microbatches: int, forward_only: bool = False
    ) -> Tensor:
        """Losses of the microbatches [num_microbatches], fp32; the caller may keep them."""

    def end_step(self) -> None:
        """Tell that the optimizer has stepped."""

    def report(self) -> CaptureReport:
        """What has been captured so far."""

    def close(self) -> None:
        """Free everything. May be called twice."""
