"""Calls that the compiled part knows to begin a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from graphstep.capture.chain import Chain
from graphstep.capture.graph_pair import GraphPair
from graphstep.native.interface import Facts, Pattern

if TYPE_CHECKING:
    from graphstep.strategies.local_calls import RegionCalls


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """What a call looks like that surely begins a run of one chain."""

    chain: Chain
    index: int
    launched: tuple[tuple[GraphPair, RegionCalls], ...]
    """What its first graph holds, and where that is called."""
    pattern: Pattern
    """Of its arguments."""
    facts: Facts
    """All else that has to be as it was for that graph."""

    @property
    def is_watched(self) -> bool:
        """True if calls that come after its first graph look at what they read themselves."""
        return self.chain.relay is not None or len(self.launched) == len(self.chain.pairs) - self.index

    def is_free(self, tensors: Sequence[Tensor]) -> bool:
        """True if it can serve a call with these tensors now, where its facts hold; else somebody finds out why not."""
        chain, (pair, _) = self.chain, self.launched[0]
        return (
            all(called.current is each.owner and not each.num_in_flight for each, called in self.launched)
            and chain.lane.allows(pair.forward_position)
            and not (pair.in_place and pair.moved_inputs(tensors))
            and not chain.lane.holds_results(pair.forward_position)
            and not ((pair.chained or pair.shared_copies) and pair.overwrites_what_is_in_use(tensors))
            and not (self.index and chain.shares_copies)
        )
