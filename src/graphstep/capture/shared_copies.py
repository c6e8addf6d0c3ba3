"""Static inputs that are read by pairs of several chains: an argument that is the same object for all of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from graphstep.capture.chain import Chain
    from graphstep.capture.graph_pair import GraphPair


class SharedCopy:
    """One static input, and what was copied there last.

    Args:
        readers: the pairs that read it.
    """

    def __init__(self, readers: Sequence[GraphPair]) -> None:
        self._readers = readers
        self._source: weakref.ref[Tensor] | None = None
        self._version = 0

    def note(self, source: Tensor) -> None:
        """It holds the values of this tensor from now on."""
        self._source, self._version = weakref.ref(source), _version_of(source)

    def is_needed_with_others(self, source: Tensor) -> bool:
        """True if a reader is in flight, whose backward half may read other values than those of this tensor."""
        if not any(reader.num_in_flight for reader in self._readers):
            return False
        return self._source is None or self._source() is not source or self._version != _version_of(source)


def note_shared_copies(chains: Iterable[Chain]) -> None:
    """Once captured: have the pairs know which of their static inputs pairs of other chains read as well.

    Within a chain it is known when pairs run for one microbatch.
    """
    readers: dict[int, dict[GraphPair, Chain]] = {}
    for chain in chains:
        for pair in chain.pairs:
            for static in pair.static_tensors():
                readers.setdefault(id(static), {})[pair] = chain
    for number, found in readers.items():
        if len(set(map(id, found.values()))) > 1:
            copy = SharedCopy(tuple(found))
            for pair in found:
                places = [place for place, static in enumerate(pair.inputs) if id(static) == number]
                pair.shared_copies += [(place, copy) for place in places]


def _version_of(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
