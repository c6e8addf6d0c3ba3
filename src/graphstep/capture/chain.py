"""Graph pairs of one slot that follow each other: the results of one are the arguments of the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from graphstep.capture.gradients import GradientHomes, Guests, Home, QuickLook
from graphstep.capture.graph_pair import GraphPair
from graphstep.capture.lanes import Lane
from graphstep.capture.read_ahead import ReadAhead
from graphstep.native.interface import Relay

if TYPE_CHECKING:
    from graphstep.capture.pending import Pending

Place = int | str
"""An argument of a call: its position or its keyword."""
Handover = tuple[tuple[Place, int], ...]
"""Which arguments of a call are which outputs of the call before."""


class Receiver(Protocol):
    """Where a region is called: finds there what to do at the next call."""

    pending: Pending | None

    def expect(self, pending: Pending) -> None:
        """Wait for the call that is described, and for no other one."""

    def expect_nothing(self) -> None:
        """End the run that waits for a call here, if there is one."""


@dataclass(frozen=True, slots=True, eq=False)
class NativeRelay:
    """A chain as the compiled part knows it."""

    relay: Relay
    ambient: tuple[Any, ...]
    """The modes around its calls."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class Chain:
    """Pairs of one slot, each of which takes the results of the one before.

    All other arguments are the same objects for all of them, and their static copies are shared.
    """

    pairs: tuple[GraphPair, ...]
    receivers: tuple[Receiver, ...]
    slot: int
    lane: Lane
    handover: Handover
    """The same between all of them."""
    anchor: Tensor
    """A leaf of every run, so that there is a backward at all, and to see which kind of pass it is."""

    relay: NativeRelay | None = None
    """For the common case, where there is a compiled part."""

    @property
    def shares_copies(self) -> bool:
        """True if a copied argument is read by several pairs."""
        if len(self.pairs) == 1:
            return False
        second = self.pairs[1]
        return len(second.inputs) - len(second.in_place) - len(self.handover) > 0

    _look: QuickLook | None = None
    _read: dict[int, ReadAhead | None] = field(default_factory=dict)
    _not_differentiable: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def has_hooks(self, pairs: Sequence[GraphPair]) -> bool:
        """True if a parameter of these may have a hook on its gradient."""
        if len(pairs) == len(self.pairs):
            return self._all_homes().has_hooks()
        return any(pair.has_new_hook() for pair in pairs)

    def _all_homes(self) -> QuickLook:
        if self._look is None:
            self._look = GradientHomes.look_at_all(pair.homes for pair in self.pairs)
        return self._look

    def all_homes(self) -> Sequence[Home]:
        """Where the gradients live that its backward halves accumulate."""
        return self._all_homes().homes

    def settle(self, pairs: Sequence[GraphPair]) -> Guests:
        """Before backward halves of these: see that gradients are where they were captured.

        Returns:
            Gradients that are not at home, and are filled after the replay.

        Raises:
            StaleAddressError: one has moved.
        """
        if len(pairs) == len(self.pairs):
            return self._all_homes().settle()
        return GradientHomes.look_at_all(pair.homes for pair in pairs).settle()

    def graph_at(self, index: int) -> tuple[GraphPair, ...]:
        """The pairs whose forward halves are launched together with that of ``index``, itself first."""
        stop = index + 1
        while stop < len(self.pairs) and self.pairs[stop].forward is None:
            stop += 1
        return self.pairs[index:stop]

    def not_differentiable(self, first: int, stop: int) -> list[int]:
        """Positions, among the results of these pairs, of those without a gradient."""
        found = self._not_differentiable.get((first, stop))
        if found is None:
            flags = [wanted for pair in self.pairs[first:stop] for wanted in pair.differentiable]
            found = [position for position, wanted in enumerate(flags) if not wanted]
            self._not_differentiable[first, stop] = found
        return found

    def landmarks(self, first: int) -> list[Tensor]:
        """Of each pair from there on a parameter, so that a backward pass towards parameters alone comes by."""
        if self.relay is not None:
            return self.relay.relay.landmarks(first)
        return [found for found in (pair.landmark for pair in self.pairs[first:]) if found is not None]

    def read_ahead(self, index: int) -> ReadAhead | None:
        """What the pairs read that the forward half of ``index`` launches, itself first.

        ``None`` where nobody asks: if it launches itself alone, and is never computed again for its backward.
        """
        if index in self._read:
            return self._read[index]
        graph = self.graph_at(index)
        is_asked = len(graph) > 1 or (graph[0].runs_again and sum(graph[0].differentiable) > 1)
        found = self._read[index] = ReadAhead(graph) if is_asked else None
        return found
