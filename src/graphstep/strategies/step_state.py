"""What the Python of a step changes outside of tensors, kept around a capture that may fail."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from graphstep.capture.attributes import Attributes
from graphstep.capture.places import Place

_DEPTH: Final = 4


class StepState:
    """Attributes, training flags, and the state of optimizers, schedulers and gradient scalers, as they are now.

    Values of tensors are the engine's to undo; here it counts which tensors, numbers and entries there are.

    Args:
        attributes: of the modules and of what else the step reads.
        modules: whose training flags count.
        optimizers: those that step.
        places: where the step finds schedulers and scalers.
    """

    def __init__(
        self,
        attributes: Attributes,
        modules: Iterable[nn.Module],
        optimizers: Iterable[Optimizer],
        places: Iterable[Place],
    ) -> None:
        self._attributes = attributes
        self._flags = [(module, module.training) for module in modules]
        self._kept: dict[int, tuple[Any, Any]] = {}
        for optimizer in optimizers:
            self._keep(vars(optimizer), _DEPTH + 1)
        for value in (place.value() for place in places):
            if isinstance(value, LRScheduler | torch.amp.GradScaler):
                self._keep(vars(value), _DEPTH)

    def put_back(self) -> None:
        """Give everything the value that it had."""
        for owner, content in self._kept.values():
            if isinstance(owner, list):
                owner[:] = content
            elif owner.keys() != content.keys() or any(owner[key] is not content[key] for key in content):
                owner.clear()
                owner.update(content)
        self._attributes.put_back()
        for module, flag in self._flags:
            module.training = flag

    def _keep(self, value: Any, depth: int) -> None:
        """A dict or list, and those in it."""
        if not isinstance(value, dict | list) or depth == 0 or id(value) in self._kept:
            return
        self._kept[id(value)] = value, value.copy()
        for each in value.values() if isinstance(value, dict) else value:
            self._keep(each, depth - 1)
