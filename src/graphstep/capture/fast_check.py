"""The common case of a check before each replay, where nothing has changed, in a few passes at the speed of C."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from operator import attrgetter, is_
from typing import Any, Final

from torch import Tensor

from graphstep.engine import torch_private
from graphstep.native.interface import Facts, FastPath

_SHAPE: Final[tuple[Callable[[Tensor], Any], ...]] = (Tensor.stride, Tensor.numel)
_LAYOUT: Final[tuple[Callable[[Tensor], Any], ...]] = (attrgetter("requires_grad"), *_SHAPE)
"""Together with the strides, the number of entries tells the shape, except where a dimension has one entry."""
_MAX_GUARDS: Final = 16


def all_same(mine: Sequence[Any], theirs: Iterable[Any]) -> bool:
    """True if both have the same objects in the same order. Never compares values."""
    given = list(theirs)
    return len(given) == len(mine) and all(map(is_, mine, given))


class FastCheck:
    """Answers "surely as it was", or "look closer". Reads only host data.

    Args:
        containers: the dicts in which modules keep parameters, buffers and submodules.
        tensors: the tensors whose address and layout matter.
    """

    def __init__(self, containers: Iterable[dict[str, Any]], tensors: Iterable[Tensor]) -> None:
        each = tuple({id(container): container for container in containers}.values())
        self._empty = [container for container in each if not container]
        self._filled = [container for container in each if container]
        self._contents = self._all_contents()
        self._sizes = list(map(len, self._filled))
        self._tensors = tuple(tensors)
        self._addresses = list(map(Tensor.data_ptr, self._tensors))
        self._layout = self._all_layouts()
        self._guard = torch_private.layout_guard(self._tensors)
        self._num_guards = 1
        self._facts: Facts | None = None

    def add_to(self, facts: Facts, *, may_be_frozen: bool = False) -> None:
        """Have the compiled part look at the same, or at all but ``requires_grad``. Layouts are as they are now."""
        for container in self._empty:
            facts.size(container, 0)
        contents = iter(self._contents)
        for container, size in zip(self._filled, self._sizes, strict=True):
            facts.whole(container, tuple(islice(contents, size)))
        for tensor, address, wanted in zip(self._tensors, self._addresses, self._layout[0], strict=True):
            facts.tensor(tensor, address, -1 if may_be_frozen else int(wanted), False, True)

    def speed_up(self, fast: FastPath) -> None:
        """From now on ask the compiled part first."""
        self._facts = fast.Facts()
        self.add_to(self._facts)

    def holds(self) -> bool:
        """True if nothing has changed. Cost: about 0.15 microseconds a tensor."""
        if self._facts is not None and self._facts.hold():
            return True
        return self.is_in_place() and self._layouts_hold()

    def is_in_place(self) -> bool:
        """True if the same tensors are there, with the same memory. Cost: about 0.1 microseconds a tensor."""
        return (
            not any(self._empty)
            and sum(map(len, self._filled)) == len(self._contents)
            and all(map(is_, self._contents, chain.from_iterable(map(dict.values, self._filled))))
            and list(map(Tensor.data_ptr, self._tensors)) == self._addresses
        )

    def is_laid_out_so(self) -> bool:
        """True if sizes and strides are as they were, frozen or not. Cost: about 0.15 microseconds a tensor."""
        return [list(map(fact, self._tensors)) for fact in _SHAPE] == self._layout[-len(_SHAPE) :]

    def _layouts_hold(self) -> bool:
        if self._guard is not None and self._guard(*self._tensors):
            return True
        if self._all_layouts() != self._layout:
            return False
        if self._num_guards < _MAX_GUARDS:
            # It is made for the modes at its making, such as autocast: have one for those of now.
            self._num_guards += 1
            self._guard = torch_private.layout_guard(self._tensors)
        return True

    def _all_layouts(self) -> list[list[Any]]:
        return [list(map(fact, self._tensors)) for fact in _LAYOUT]

    def _all_contents(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self._filled)))
