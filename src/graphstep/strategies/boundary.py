"""Where a training step ends, seen from inside the model: the loop does not say it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Final

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from graphstep.capture.static_inputs import versions_of

_PATIENCE: Final = 16
"""Moments with nothing in flight after which a step is taken to be over although no weight seems to have changed:
an optimizer that is not torch's may write in a way that leaves no trace."""


class StepBoundary:
    """Tells whether the weights have been updated since :meth:`start`.

    Either an optimizer of torch has stepped that has one of the parameters, or the version of one has changed: fused
    optimizers change none, and other optimizers have no hook. The hook, which torch has for the whole process only, is
    in place from :meth:`start` to :meth:`clear`.

    Args:
        parameters: those that are trained.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._identities = frozenset(map(id, self._parameters))
        self._versions: list[int] | None = None
        self._patience = 0
        self._has_stepped = False
        self._handle: RemovableHandle | None = None
        self._finalizer: weakref.finalize[[], StepBoundary]

    def start(self) -> None:
        """A step has begun."""
        self._versions = self._now()
        self._patience = _PATIENCE
        self._has_stepped = False
        if self._handle is None:
            this = weakref.ref(self)

            def stepped(optimizer: Optimizer, _arguments: Any, _named: Any) -> None:
                boundary = this()
                if boundary is not None:
                    boundary._stepped(optimizer)

            self._handle = register_optimizer_step_post_hook(stepped)
            self._finalizer = weakref.finalize(self, self._handle.remove)

    def has_stepped(self) -> bool:
        """True if an optimizer of torch has stepped."""
        return self._versions is not None and self._has_stepped

    def has_passed(self) -> bool:
        """Asked with nothing in flight: true once the step is over."""
        if self._versions is None:
            return False
        self._patience -= 1
        return self._has_stepped or self._patience <= 0 or self._now() != self._versions

    def clear(self) -> None:
        """Wait for the next :meth:`start`."""
        self._versions = None
        if self._handle is not None:
            self._finalizer.detach()
            self._handle.remove()
            self._handle = None

    def _stepped(self, optimizer: Optimizer) -> None:
        if not self._has_stepped:
            self._has_stepped = any(
                id(parameter) in self._identities for group in optimizer.param_groups for parameter in group["params"]
            )

    def _now(self) -> list[int]:
        return versions_of(self._parameters)
