"""What the training loop expects of a strategy; those of :mod:`graphstep.strategies` fit, and so does a test double."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import torch
from rich.console import RenderableType
from torch import Tensor, nn

from graphstep.config import CudaGraphConfig


class StepReport(Protocol):
    """What was captured so far."""

    @property
    def num_recordings(self) -> int:
        """Recordings that exist."""

    @property
    def capture_seconds(self) -> float:
        """Time spent on capturing."""

    @property
    def pool_bytes(self) -> int:
        """Memory held by recordings."""

    def render(self) -> RenderableType:
        """Return a table for the console."""

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""


class StepStrategy(Protocol):
    """Runs forward and backward of a step, eagerly or from recordings."""

    def forward_backward(
        self, *, data_iterator: Iterator[Mapping[str, Tensor]], num_microbatches: int, forward_only: bool = False
    ) -> Tensor:
        """Return the losses, [num_microbatches] fp32, safe to keep; gradients are added to the buffers."""

    def end_step(self) -> None:
        """Take note that the optimizer has stepped."""

    def report(self) -> StepReport:
        """Say what is captured."""

    def close(self) -> None:
        """Free the recordings; may be called twice."""


class ForwardBackward(Protocol):
    """Forward and backward of all microbatches, as in :mod:`graphstep.training.step`."""

    def __call__(
        self,
        *,
        data_iterator: Iterator[Mapping[str, Tensor]],
        model: nn.Module,
        num_microbatches: int,
        forward_only: bool = False,
    ) -> Tensor:
        """Return the losses."""


class StrategyFactory(Protocol):
    """Builds the strategy that the switches ask for."""

    def __call__(
        self,
        graphs: CudaGraphConfig,
        *,
        model: nn.Module,
        forward_backward_func: ForwardBackward,
        device: torch.device,
    ) -> StepStrategy:
        """Return a new strategy, which nobody else uses."""
