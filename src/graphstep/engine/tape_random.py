"""Random numbers on a tape: each replay draws anew, and rewinds of a generator are repeated.

A dispatch mode does not see ``set_rng_state``. What it sees is that a generator is not in the state in which the last
random operation left it. If the state was seen earlier in the same capture the generator was rewound (activation
recompute does that), which is recorded as a rewind to that mark; otherwise it was reseeded, which cannot be replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class _Mark:
    """A point of the tape whose generator state may be wanted again."""

    position: int
    """The number of recorded steps at that point."""
    is_wanted: bool = False
    state: torch.Tensor | None = None

    def save(self, generator: torch.Generator) -> None:
        self.state = generator.get_state()

    def restore(self, generator: torch.Generator) -> None:
        if self.state is not None:
            generator.set_state(self.state)


@dataclass(slots=True)
class GeneratorTrack:
    """The states of one CPU generator through one capture."""

    generator: torch.Generator
    initial: torch.Tensor = field(init=False)
    _marks: dict[bytes, _Mark] = field(init=False)
    _expected: bytes = field(init=False)
    has_drawn: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.initial = self.generator.get_state()
        # The capture begins one draw later, in a state that no seed leads to and that nobody kept: whatever the
        # function sets the generator to from outside is then told apart from a rewind to its own beginning.
        torch.empty(1).uniform_(generator=self.generator)
        self._expected = _key(self.generator.get_state())
        self._marks = {self._expected: _Mark(position=0)}

    def rewind_before(self) -> Callable[[], None] | None:
        """The step to record if the generator was rewound since the last random operation.

        Raises:
            LookupError: the state was never seen in this capture: the generator was reseeded.
        """
        current = _key(self.generator.get_state())
        if current == self._expected:
            return None
        mark = self._marks.get(current)
        if mark is None:
            raise LookupError("a state that this capture has not seen")
        mark.is_wanted = True
        self._expected = current
        return lambda: mark.restore(self.generator)

    def drawn(self, position: int) -> None:
        """Note the state after a random operation; ``position`` is the number of recorded steps so far."""
        self.has_drawn = True
        self._expected = _key(self.generator.get_state())
        self._marks.setdefault(self._expected, _Mark(position))

    def saves(self) -> list[tuple[int, Callable[[], None]]]:
        """Steps that keep the states needed later, each with the position before which it belongs."""
        return [
            (mark.position, lambda mark=mark: mark.save(self.generator))  # type: ignore[misc]
            for mark in self._marks.values()
            if mark.is_wanted
        ]

    def restore_initial(self) -> None:
        """Put the generator back to where the capture began."""
        self.generator.set_state(self.initial)


def _key(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()
