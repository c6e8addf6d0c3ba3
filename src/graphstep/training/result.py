"""What a run of training has to show."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphstep.capture.report import CaptureReport


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run has to show."""

    first_iteration: int
    """Completed steps at the start: 0, or those of the checkpoint."""
    iteration: int
    """Completed steps at the end."""
    is_interrupted: bool
    """Ctrl-C ended the run early."""
    first_loss: float | None
    """Training loss of the first step; None when no step was made."""
    last_loss: float | None
    """Training loss, mean over the last log interval."""
    first_validation_loss: float | None
    """Before the first step; None without validation."""
    last_validation_loss: float | None
    """After the last step."""
    step_ms: float | None
    """Median time of a step once everything is captured (of eager runs: after the first three steps)."""
    peak_bytes: int
    """Peak of allocated device memory on CUDA, of resident memory on the CPU."""
    device: torch.device
    report: CaptureReport
    """What was captured."""
