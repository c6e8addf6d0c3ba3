"""Arguments at fixed addresses, refreshed before each replay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from graphstep.capture.tree import flatten, unflatten


class StaticInputs:
    """Copies of one call's tensors at addresses that a recording may read.

    Args:
        arguments: the call's arguments; values that are not tensors are kept as they are.
        device: where the copies live.
    """

    def __init__(self, arguments: Any, device: torch.device) -> None:
        tensors, self._structure = flatten(arguments)
        self._tensors = [_like(tensor, device) for tensor in tensors]
        self.arguments = unflatten(self._structure, self._tensors)
        """The same nesting, with the static tensors in it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the static tensors."""
        return sum(tensor.nbytes for tensor in self._tensors)

    def load(self, arguments: Any) -> None:
        """Copy the tensors of another call with the same signature into place.

        Host tensors in pinned memory are copied without waiting; they must stay unchanged until the device has read
        them. Cost: one copy a tensor.
        """
        tensors, _ = flatten(arguments)
        for target, source in zip(self._tensors, tensors, strict=True):
            target.copy_(source, non_blocking=True)


def _like(tensor: Tensor, device: torch.device) -> Tensor:
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return copy.requires_grad_(tensor.requires_grad)


def to_device(batch: Any, device: torch.device) -> Any:
    """The same nesting with every tensor on ``device``; tensors that are there already are not copied."""
    tensors, structure = flatten(batch)
    return unflatten(structure, [tensor.to(device, non_blocking=True) for tensor in tensors])
