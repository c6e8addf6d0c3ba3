"""Learning-rate schedules: warmup, then constant, linear, cosine or warmup-stable-decay (WSD).

Every option means what it means in Megatron-LM: the first update uses the rate of step 0, so a warmup from 0 makes the
first update a null update, and the full rate is reached after ``lr_warmup_iters`` updates.
"""

from __future__ import annotations

import math

from graphstep.config import TrainingConfig


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Return the learning rate of one update.

    Args:
        config: rates, shape and lengths; valid by construction.
        step: updates completed before, 0 for the first one.
    """
    if config.lr_warmup_iters > 0 and step <= config.lr_warmup_iters:
        return config.lr_warmup_init + (config.lr - config.lr_warmup_init) * step / config.lr_warmup_iters
    if config.lr_decay_style == "constant":
        return config.lr
    if step > config.lr_decay_iters:
        return config.min_lr
    return config.min_lr + _remaining(config, step) * (config.lr - config.min_lr)


def _remaining(config: TrainingConfig, step: int) -> float:
    """Return how much of the way from ``min_lr`` to ``lr`` is left, 1 to 0."""
    if config.lr_decay_style == "WSD":
        start = config.lr_decay_iters - config.lr_wsd_decay_iters
        if step <= start:
            return 1.0
        return _shape(config.lr_wsd_decay_style, (step - start) / config.lr_wsd_decay_iters)
    return _shape(
        config.lr_decay_style, (step - config.lr_warmup_iters) / (config.lr_decay_iters - config.lr_warmup_iters)
    )


def _shape(style: str, progress: float) -> float:
    """Return 1 at progress 0 and 0 at progress 1.

    Source: Loshchilov and Hutter 2017, "SGDR", equation 5 (cosine); Hu et al. 2024, "MiniCPM", section 4 (WSD, the
    exponential); Hägele et al. 2024, "Scaling laws and compute-optimal training beyond fixed training durations"
    (1 - sqrt).
    """
    if style == "linear":
        return 1.0 - progress
    if style == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    if style == "minus_sqrt":
        return 1.0 - math.sqrt(progress)
    # The exponential that is exactly 1 at progress 0 and exactly 0 at progress 1.
    return float(2.0 * 0.5**progress - 1.0)
