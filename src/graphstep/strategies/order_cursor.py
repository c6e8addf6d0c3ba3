"""Sees to it that graphs run in the order that they were captured in, where that was given by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from graphstep.capture.plan import Phase
from graphstep.errors import PlanError


@dataclass(frozen=True, slots=True)
class Turn:
    """One run of one half of a callable."""

    name: str
    chunk: int
    microbatch: int
    phase: Phase

    def __str__(self) -> str:
        return f"the {self.phase.value} of {self.name} for microbatch {self.microbatch} (chunk {self.chunk})"


_CHANGE: Final = MappingProxyType({Phase.FORWARD: 1, Phase.BACKWARD: -1, Phase.WEIGHT_GRADIENT: 0})
"""Of the number of microbatches in flight."""


class OrderCursor:
    """The place of a step in its order. After the last turn comes the first again.

    Args:
        turns: the order of one step.
        is_idle: true if nothing is in flight.
    """

    def __init__(self, turns: Sequence[Turn], is_idle: Callable[[], bool]) -> None:
        self._turns = tuple(turns)
        self._next = 0
        self._is_idle = is_idle

    @property
    def expected(self) -> Turn:
        """Whose turn it is."""
        return self._turns[self._next]

    def check(self, turn: Turn) -> None:
        """Refuse what is not next.

        A step that was given up, with nothing in flight any more, may begin anew.

        Raises:
            PlanError: names what was expected and what came.
        """
        if turn == self.expected or self.begins_anew(turn):
            return
        raise PlanError(
            f"expected {self.expected}, and {turn} came",
            where=f"place {self._next + 1} of {len(self._turns)} in the order of a step",
            fix="run forwards, backwards and weight gradients (backward_dw()) in the order that was given, or give the "
            "order in which they run; after an error in the middle of a step let go of its results",
        )

    def begins_anew(self, turn: Turn) -> bool:
        """True for the first turn of a step, if the step before was given up."""
        return turn == self._turns[0] and turn != self.expected and self._is_idle()

    def take(self, turn: Turn) -> None:
        """It runs now: the next one follows.

        Raises:
            PlanError: see :meth:`check`.
        """
        self.check(turn)
        if turn != self.expected:
            self._next = 0
        self._next = (self._next + 1) % len(self._turns)

    def next_turn(self, name: str, chunk: int, phase: Phase) -> Turn:
        """The turn that this would be now, for a chunk: of the microbatch after those that have had theirs."""
        before = self._turns[: self._next]
        num_in_flight = sum(_CHANGE[turn.phase] for turn in before)
        if self._is_idle() and num_in_flight:
            before = ()  # The step was given up.
        done = sum(turn.chunk == chunk and turn.phase is phase for turn in before)
        return Turn(name, chunk, done, phase)
