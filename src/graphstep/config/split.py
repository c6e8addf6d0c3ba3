"""The weights of training, validation and test data."""

from __future__ import annotations

import math


def split_weights(text: str) -> tuple[float, float, float]:
    """Return the weights of training, validation and test data as shares that add up to 1.

    Args:
        text: one to three numbers >= 0 with commas or slashes between them, the first one above 0; missing ones are 0.

    Raises:
        ValueError: something else.
    """
    weights = [float(part) for part in text.replace("/", ",").split(",")]
    weights += [0.0] * (3 - len(weights))
    total = sum(weights)
    if len(weights) != 3 or min(weights) < 0 or not math.isfinite(total) or weights[0] / (total or 1.0) <= 0:
        raise ValueError(f"expected one to three weights with a positive first one, got {text!r}")
    train, valid, test = (weight / total for weight in weights)
    return train, valid, test


def is_split(text: str) -> bool:
    """Can ``split_weights`` read this?"""
    try:
        split_weights(text)
    except ValueError:
        return False
    return True
