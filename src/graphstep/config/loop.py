"""What the training loop does besides training. Names and meaning are those of Megatron-LM's options."""

from __future__ import annotations

from dataclasses import dataclass

from graphstep.config.choices import DataloaderType, Optimizer
from graphstep.config.section import Section


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig(Section):
    """Optimizer, checks and measurements of the loop.

    Raises:
        ConfigError: unknown words; all problems at once.
    """

    optimizer: Optimizer = "adam"
    """Which optimizer."""
    skip_train: bool = False
    """Validate and test only."""
    dataloader_type: DataloaderType | None = None
    """Order of the data: once through, again and again, or the user's own; None: chosen by the task."""
    calculate_per_token_loss: bool = False
    """Average the loss over tokens instead of microbatches."""
    check_for_large_grads: bool = False
    """Stop when a gradient is unexpectedly large, which is read back to the host."""
    check_for_spiky_loss: bool = False
    """Look for jumps of the loss, which is read back to the host."""
    log_num_zeros_in_grad: bool = False
    """Count zeros in the gradients, which are read back to the host."""
    timing_log_level: int = 0
    """0 to 2: how much is timed; from 1 on, timers wait for the device."""
