"""Copies of results that callers got, where another graph reads the results themselves."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor

from graphstep.capture.graph_pair import GraphPair


class HandedCopies:
    """Knows for each pair the copies of its latest results."""

    def __init__(self) -> None:
        self._copies: dict[GraphPair, list[tuple[weakref.ref[Tensor], int]]] = {}

    def note(self, pair: GraphPair, results: Sequence[Tensor]) -> None:
        """A caller got these, and the same values are in the results of the pair."""
        self._copies[pair] = [(weakref.ref(result), result._version) for result in results]

    def originals(self, pair: GraphPair, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """The arguments of a pair, with the results that it reads in place of unchanged copies of them."""
        found = list(tensors)
        for position, (source, output) in pair.chained.items():
            given = tensors[position]
            for copy, version in self._copies.get(source, [])[output : output + 1]:
                if copy() is given and given._version == version:
                    found[position] = source.outputs[output]
        return found
