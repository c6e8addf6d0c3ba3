"""What layers read, to see whether it was written between the launch of their graph and its use."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Final

from torch import Tensor

from graphstep.capture.graph_pair import GraphPair
from graphstep.engine import torch_private

_version_of: Final = attrgetter("_version")


class ReadAhead:
    """Weights, buffers and other tensors that the pairs of a graph read where they are.

    One that is launched with a pair before it has run when it is called: what was written meanwhile it has not seen.
    And what is computed again for its backward must read what the forward has read. Writes past autograd, such as those
    through ``.data``, are not seen here either.
    """

    def __init__(self, pairs: Sequence[GraphPair]) -> None:
        self._owned = [_owned(pair) for pair in pairs]
        self._flat = [tensor for owned in self._owned for tensor in owned]
        self._bounds = list(pairwise(accumulate(map(len, self._owned), initial=0)))
        self._others = [_others(pair) for pair in pairs]
        self.has_others = any(self._others)
        """Tensors are read that belong neither to the modules nor to the arguments."""
        self.kept = [pair.kept for pair in pairs[1:] if pair.kept is not None]
        """What pairs write that run before their calls, in order."""
        self._pairs_kept = [pair.kept for pair in pairs]
        self._only_in_backward = [pair.observation.only_in_backward for pair in pairs]

    def owned(self, place: int) -> Sequence[Tensor]:
        """What a pair reads of its modules and of arguments that are read in place."""
        return self._owned[place]

    def versions(self) -> list[int]:
        """They tell whether somebody writes. Cost: less than 0.1 microseconds a tensor."""
        found = list(map(_version_of, self._flat))
        if self.has_others:
            found += [_version_of_source(source) for others in self._others for source in others]
        return found

    def has_changed(self, place: int, versions: Sequence[int]) -> bool:
        """True if somebody has written into what a pair of the graph reads since the versions were these."""
        start, stop = self._bounds[place]
        if list(map(_version_of, self._owned[place])) != versions[start:stop]:
            return True
        return self.has_others and self._have_others_changed(place, versions)

    def is_as_in_forward(self, place: int, versions: Sequence[int]) -> bool:
        """True if what the forward half of a pair reads has still these versions, or can be put back."""
        start, _ = self._bounds[place]
        changed = [t for t, version in zip(self._owned[place], versions[start:], strict=False) if t._version != version]
        return all(self._is_as_good_as_unchanged(place, tensor) for tensor in changed) and not (
            self.has_others and self._have_others_changed(place, versions)
        )

    def _is_as_good_as_unchanged(self, place: int, tensor: Tensor) -> bool:
        kept = self._pairs_kept[place]
        if kept is not None and kept.owns(tensor):
            return True
        return torch_private.storage_key(tensor) in self._only_in_backward[place]

    def _have_others_changed(self, place: int, versions: Sequence[int]) -> bool:
        start = len(self._flat) + sum(map(len, self._others[:place]))
        others = self._others[place]
        return list(map(_version_of_source, others)) != versions[start : start + len(others)]


def _owned(pair: GraphPair) -> list[Tensor]:
    tensors = [*pair.region.tensors(), *(pair.inputs[position] for position in sorted(pair.in_place))]
    return [tensor for tensor in tensors if not tensor.is_inference()]  # Nothing tells of writes into those.


def _others(pair: GraphPair) -> list[weakref.ref[Tensor]]:
    seen = zip(pair.observation.externals, pair.observation.sources, strict=True)
    return [source for tensor, source in seen if torch_private.storage_key(tensor) not in pair.known_storages]


def _version_of_source(source: weakref.ref[Tensor]) -> int:
    tensor = source()
    return -1 if tensor is None or tensor.is_inference() else tensor._version
