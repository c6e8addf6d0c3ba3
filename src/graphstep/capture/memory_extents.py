"""Which memory work uses, and whether a call meets it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from graphstep.engine import torch_private
from graphstep.engine.tape_ops import tensors_in

_SAY_WHAT_THEY_DO: Final = frozenset({"aten", "prims"})

Extent = tuple[int, int]
"""The first byte of some memory, and the one behind its last."""


@dataclass(frozen=True, slots=True)
class Use:
    """What a piece of work reads and writes."""

    reads: Sequence[Extent]
    writes: Sequence[Extent]

    def is_read(self, extent: Extent) -> bool:
        """True if any of this memory is read."""
        return any(first < extent[1] and extent[0] < last for first, last in self.reads)

    def is_written(self, extent: Extent) -> bool:
        """True if any of this memory is written."""
        return any(first < extent[1] and extent[0] < last for first, last in self.writes)

    def meets(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """True if a call may read what this writes, or write what this uses."""
        if is_only_a_view(func):
            return False
        if not says_what_it_does(func):
            return True
        tensors = tensors_in([*args, *kwargs.values()])
        extents = [extent_of(tensor) for tensor in tensors if torch_private.has_plain_memory(tensor)]
        writes = func._schema.is_mutable
        return any(self.is_written(extent) or (writes and self.is_read(extent)) for extent in extents)


def extent_of(tensor: Tensor) -> Extent:
    """The first byte of a tensor, and the one behind its last."""
    begin = tensor.data_ptr()
    if tensor.numel() == 0:
        return begin, begin
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def is_only_a_view(func: Any) -> bool:
    """Does this call give another view of the same memory, without a look at it?

    Composite operations that may copy count as views to torch, and come undivided in inference mode.
    """
    return bool(func.is_view) and says_what_it_does(func) and not torch_private.is_composite(func)


def says_what_it_does(func: Any) -> bool:
    """Is it one of torch's own, which reads and writes its arguments alone? Others may use anything."""
    return func.namespace in _SAY_WHAT_THEY_DO
