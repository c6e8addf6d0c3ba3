"""The order in which regions run, and what it says about memory."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from graphstep.capture.region import Region
from graphstep.capture.signature import Signature
from graphstep.errors import PlanError


class Phase(enum.Enum):
    """Which half of a graph pair runs."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True, slots=True)
class Event:
    """One run of one half of a region's pair."""

    region: Region
    slot: int
    """Which of the microbatches in flight, from 0."""
    phase: Phase

    def __str__(self) -> str:
        return f"{self.phase.value} of {self.region.name} (slot {self.slot})"


@dataclass(frozen=True, slots=True)
class Origin:
    """An output of a region: which region, which slot, which of its output tensors."""

    region: Region
    slot: int
    output: int


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """How a region was called in the observed step."""

    signature: Signature
    origins: tuple[Origin | None, ...]
    """Where each argument tensor came from, if from another region."""
    addresses: tuple[int, ...]


@dataclass(slots=True)
class Plan:
    """Events of one step in order; each (region, slot) is captured at its first forward and first backward."""

    events: list[Event] = field(default_factory=list)
    calls: dict[tuple[Region, int], ObservedCall] = field(default_factory=dict)
    reused: set[Region] = field(default_factory=set)
    """Regions that ran several times before one and the same backward pass: their gradients belong together."""

    @property
    def num_slots(self) -> int:
        """The most microbatches in flight."""
        return 1 + max((event.slot for event in self.events), default=-1)

    @property
    def is_nested(self) -> bool:
        """True for one microbatch after another: each backward belongs to the latest forward that still waits for one.

        Only then may memory that one backward frees be used by the next: any other order in later steps could not be
        told from a wrong one before it is too late.
        """
        waiting: list[Event] = []
        trained = self.trained()
        for event in self.first_events():
            if (event.region, event.slot) not in trained:
                continue
            if event.phase is Phase.FORWARD:
                waiting.append(event)
            elif waiting.pop().region is not event.region:
                return False
        return self.num_slots <= 1

    def first_events(self) -> list[Event]:
        """The events without repetitions: the order of capture."""
        return list(dict.fromkeys(self.events))

    def trained(self) -> set[tuple[Region, int]]:
        """Regions and slots whose backward was seen."""
        return {(event.region, event.slot) for event in self.events if event.phase is Phase.BACKWARD}


class PlanObserver:
    """Writes a plan while a step runs eagerly."""

    def __init__(self) -> None:
        self.plan = Plan()
        self._in_flight: dict[Region, set[int]] = {}
        self._last_pass: dict[Region, int] = {}
        self._origins: dict[int, tuple[weakref.ref[Tensor], Origin]] = {}

    def forward(self, region: Region, signature: Signature, inputs: Sequence[Tensor]) -> int:
        """Note a forward before it runs; returns its slot: the lowest that is not in flight."""
        busy = self._in_flight.setdefault(region, set())
        slot = lowest_free(busy)
        busy.add(slot)
        self.plan.events.append(Event(region, slot, Phase.FORWARD))
        origins = tuple(self._origin_of(tensor) for tensor in inputs)
        call = ObservedCall(signature, origins, tuple(tensor.data_ptr() for tensor in inputs))
        self.plan.calls.setdefault((region, slot), call)
        return slot

    def outputs(self, region: Region, slot: int, outputs: Sequence[Tensor]) -> None:
        """Note what the forward returned."""
        for index, tensor in enumerate(outputs):
            self._origins[id(tensor)] = (weakref.ref(tensor), Origin(region, slot, index))

    def backward(self, region: Region, slot: int, backward_pass: int | None = None) -> None:
        """Note that the backward of a region begins, in which backward pass of autograd."""
        busy = self._in_flight.get(region, set())
        if slot in busy:
            busy.discard(slot)
            self.plan.events.append(Event(region, slot, Phase.BACKWARD))
            if backward_pass is not None and self._last_pass.get(region) == backward_pass:
                self.plan.reused.add(region)
            if backward_pass is not None:
                self._last_pass[region] = backward_pass

    def dropped(self, region: Region, slot: int) -> None:
        """Note that no backward will come for a forward: its result is gone. It is no part of the plan."""
        busy = self._in_flight.get(region, set())
        if slot not in busy:
            return
        busy.discard(slot)
        event = Event(region, slot, Phase.FORWARD)
        position = len(self.plan.events) - 1 - self.plan.events[::-1].index(event)
        del self.plan.events[position]
        if event not in self.plan.events:
            del self.plan.calls[region, slot]

    def _origin_of(self, tensor: Tensor) -> Origin | None:
        found = self._origins.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None


class PlanGuard:
    """Refuses replays in an order for which the shared memory is not safe.

    Memory freed by one backward at capture was handed to later ones. With one microbatch in flight that is safe as long
    as the halves run in the order of capture; parts of it may be left out. With several in flight (a plan that is not
    nested) nothing is handed on, and any order is safe.
    """

    def __init__(self, plan: Plan) -> None:
        self._positions = {event: position for position, event in enumerate(plan.first_events())}
        self._is_ordered = plan.is_nested
        self._last = -1
        self._in_flight: dict[tuple[Region, int], tuple[int, int]] = {}
        """Positions of forward and backward."""

    def why_not(self, region: Region, slot: int) -> str:
        """Why a forward may not be replayed now, so that it is better run eagerly; empty if it may.

        Whatever is in flight must have been around this region when it was captured: else they may share memory.
        """
        if self._is_ordered and self._in_flight:
            events = (Event(region, slot, phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
            forward, backward = (self._positions[event] for event in events)
            if forward <= self._last or not all(f < forward and backward < b for f, b in self._in_flight.values()):
                return "out of the order of the first step"
        return ""

    def enter(self, event: Event) -> None:
        """Check an event before its replay.

        Raises:
            PlanError: it comes too late. Nothing was replayed.
        """
        if not self._is_ordered:
            return
        if not self._in_flight:
            self._last = -1
        position = self._positions[event]
        if position <= self._last:
            raise PlanError(
                f"{event} came after an event that follows it in the captured order",
                where=event.region.name,
                fix="run forwards and backwards in the order of the first step",
            )
        self._last = position

    def started(self, region: Region, slot: int) -> None:
        """A forward ran whose backward is still to come."""
        if self._is_ordered:
            events = (Event(region, slot, phase) for phase in (Phase.FORWARD, Phase.BACKWARD))
            forward, backward = (self._positions[event] for event in events)
            self._in_flight[region, slot] = forward, backward

    def finished(self, region: Region, slot: int) -> None:
        """A forward's backward ran, or its result was dropped."""
        self._in_flight.pop((region, slot), None)


def lowest_free(busy: set[int]) -> int:
    """The lowest number that is not taken."""
    slot = 0
    while slot in busy:
        slot += 1
    return slot
