"""Where a training step ends, seen from inside the model: the loop does not say it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from torch import Tensor

_PATIENCE: Final = 64
"""Moments with nothing in flight after which a step is taken to be over although no weight seems to have changed:
some optimizers write in a way that leaves no trace."""


class StepBoundary:
    """Tells whether the weights have been updated since :meth:`start`.

    Args:
        parameters: those that are trained.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._versions: list[int] | None = None
        self._patience = 0

    def start(self) -> None:
        """A step has begun."""
        self._versions = self._now()
        self._patience = _PATIENCE

    def has_passed(self) -> bool:
        """Asked with nothing in flight: true once the step is over."""
        if self._versions is None:
            return False
        self._patience -= 1
        return self._patience <= 0 or self._now() != self._versions

    def clear(self) -> None:
        """Wait for the next :meth:`start`."""
        self._versions = None

    def _now(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]
