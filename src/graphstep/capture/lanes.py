"""Which graph pairs share memory, and when one of them may run."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from graphstep.capture.holders import Holders
from graphstep.capture.plan import Event, Key, Phase, Plan, Variant
from graphstep.capture.region import Region


@dataclass(slots=True, eq=False)
class Span:
    """Something in flight: the positions, in the order of capture, of its latest forward and of that one's backward.

    It is no more than that, so that a lane keeps nothing alive.
    """

    forward_position: int = 0
    backward_position: float = 0

    @classmethod
    def of_results(cls, forward_position: int) -> Span:
        """Results of this forward, which are read where they are: no backward frees them."""
        return cls(forward_position, math.inf)


class Results(Protocol):
    """The results of a captured forward half, whose memory stays theirs."""

    forward_position: int
    copies_results: bool
    """Callers get copies of them."""
    shared_results: set[int]
    """Those that lie in the same memory."""

    @property
    def holders(self) -> Holders:
        """Whether callers hold them."""


class Lane:
    """Memory that forward halves share: what one needs no more after its backward, later captured ones use.

    A forward half may therefore only run while all that is in flight in its lane was so when it was captured: begun
    before it, and with a backward still to come. Then it writes nothing that they need. Backward halves take nothing
    from a lane but what their forward left there, so that they may run in any order.

    Results keep their memory as long as their recording lives, so that nothing captured after them lies there. What was
    captured before them may lie there, and may not run while a caller holds them.
    """

    def __init__(self) -> None:
        self._spans: list[Span] = []
        self.latest: Span | None = None
        """What entered last, if it is still in flight."""
        self._results: list[Results] = []
        self._dropped: list[Results] = []
        """Those whose recordings are gone and whom a caller held by then."""
        self._looks: dict[int, Holders] = {}
        """By position: all results captured there or later."""

    def add(self, results: Results) -> None:
        """From now on callers may hold these."""
        self._results.append(results)
        self._forget_dropped()

    def drop(self, results: Results) -> None:
        """Their recording is gone. What a caller still holds is kept in mind until it is let go."""
        if results in self._results:
            self._results.remove(results)
            self._dropped.append(results)
            self._forget_dropped()

    def holds_results(self, position: int) -> bool:
        """True if a caller holds results that the forward half captured at this position may overwrite."""
        if not self._is_held(position):
            return False
        self._forget_dropped()
        return self._is_held(position)

    def copy_held_results(self) -> None:
        """Whoever keeps a result will do so again: from their next call on, they get copies."""
        for each in self._results:
            # Copies would not share memory as the results do.
            if each.holders.are_more() and not each.shared_results:
                each.copies_results = True

    def _is_held(self, position: int) -> bool:
        look = self._looks.get(position)
        if look is None:
            later = [each for each in (*self._results, *self._dropped) if each.forward_position >= position]
            look = self._looks[position] = Holders.joined(each.holders for each in later)
        return look.are_more()

    def _forget_dropped(self) -> None:
        self._dropped = [each for each in self._dropped if each.holders.are_more()]
        self._looks.clear()

    def allows(self, position: int) -> bool:
        """True if the forward half that was captured at this position may run now."""
        return all(span.forward_position < position < span.backward_position for span in self._spans)

    def enter(self, span: Span) -> None:
        """Something is in flight from now on. It raises its forward position as it goes on."""
        self._spans.append(span)
        self.latest = span

    def leave(self, span: Span) -> None:
        """It is no longer in flight. May be called twice."""
        if span in self._spans:
            self._spans.remove(span)
        if self.latest is span:
            self.latest = None


def lane_groups(plan: Plan, apart: Mapping[Region, int] = MappingProxyType({})) -> dict[Variant, int]:
    """A number for each variant: those with equal numbers may share memory, slot by slot.

    Within a slot, their runs in the plan are nested in each other or apart, as those of the layers of one microbatch
    are. Usually one group holds all; an interleaved schedule makes one for each model chunk.

    Args:
        plan: the order.
        apart: the group of each region for a plan that goes on in another order than it begins, so that some of its
            forwards could not run; empty if that does not matter.
    """
    found = _nested_groups(plan)
    if apart and not _allows_all(plan, found):
        return {variant: apart[variant.region] for variant in found}
    return found


def _allows_all(plan: Plan, groups: Mapping[Variant, int]) -> bool:
    """True if every forward of the plan may run when its turn comes."""
    positions: dict[tuple[Variant, int], list[int]] = {}
    for position, event in enumerate(plan.first_events()):
        positions.setdefault((event.variant, event.slot), []).append(position)
    lanes, spans = Lanes(), dict[tuple[Variant, int], Span]()
    last_phase = plan.last_phase()
    for event in plan.events:
        key = event.variant, event.slot
        lane = lanes.of(groups[event.variant], event.slot)
        if event.phase is last_phase.get(key):
            lane.leave(spans.pop(key))
        elif event.phase is Phase.FORWARD:
            if not lane.allows(positions[key][0]):
                return False
            spans[key] = Span(positions[key][0], positions[key][-1])
            lane.enter(spans[key])
    return True


def delayed_lanes(plan: Plan, groups: Mapping[Variant, int]) -> dict[Key, Hashable]:
    """For each variant and slot with weight gradients of its own: the memory of its backward half.

    What that half leaves for the weight gradients has to stay until they are computed. Halves of one slot share memory
    if, whenever one of them runs, all others of them that wait for their weight gradients did so when it was captured.
    """
    positions: dict[tuple[Key, Phase], int] = {}
    for position, event in enumerate(plan.first_events()):
        positions[(event.variant, event.slot), event.phase] = position
    delayed = plan.delayed()
    waiting: dict[tuple[int, int], list[Span]] = {}
    spans: dict[Key, Span] = {}
    alone: set[tuple[int, int]] = set()
    for event in plan.events:
        key = event.variant, event.slot
        place = groups[event.variant], event.slot
        if event.phase is Phase.BACKWARD and key in delayed:
            span = spans[key] = Span(positions[key, Phase.BACKWARD], positions[key, Phase.WEIGHT_GRADIENT])
            others = waiting.setdefault(place, [])
            if not all(other.forward_position < span.forward_position < other.backward_position for other in others):
                alone.add(place)
            others.append(span)
        elif event.phase is Phase.WEIGHT_GRADIENT:
            waiting[place].remove(spans.pop(key))
    found: dict[Key, Hashable] = {}
    for number, key in enumerate(delayed):
        place = groups[key[0]], key[1]
        found[key] = ("delayed", place, number) if place in alone else ("delayed", place)
    return found


def _nested_groups(plan: Plan) -> dict[Variant, int]:
    variants = list(dict.fromkeys(event.variant for event in plan.events))
    groups: list[set[Variant]] = []
    last_phase = plan.last_phase()
    for variant in variants:
        for group in groups:
            if _is_nested(plan.events, last_phase, group | {variant}):
                group.add(variant)
                break
        else:
            groups.append({variant})
    return {variant: number for number, group in enumerate(groups) for variant in group}


def _is_nested(events: Iterable[Event], last_phase: Mapping[Key, Phase], variants: set[Variant]) -> bool:
    waiting: dict[int, list[Variant]] = {}
    for event in events:
        if event.variant not in variants:
            continue
        stack = waiting.setdefault(event.slot, [])
        if event.phase is Phase.FORWARD:
            stack.append(event.variant)
        elif event.phase is last_phase[event.variant, event.slot] and (not stack or stack.pop() is not event.variant):
            return False
    return True


class Lanes:
    """The lanes of a session by group and slot, and the clock of its captures."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[int, int], Lane] = {}
        self._clock = itertools.count()

    def of(self, group: int, slot: int) -> Lane:
        """The lane of a group and slot, made on first use."""
        return self._lanes.setdefault((group, slot), Lane())

    def tick(self) -> int:
        """The next position in the order of capture."""
        return next(self._clock)
