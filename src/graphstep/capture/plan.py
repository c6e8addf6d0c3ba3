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
    as the halves run in the order of capture; parts of it may be left out. With several in flight nothing is handed on,
    and any order is safe.
    """

    def __init__(self, plan: Plan) -> None:
        self._positions = {event: position for position, event in enumerate(plan.first_events())}
        self._is_ordered = plan.num_slots == 1
        self._last = -1
        self._num_in_flight = 0

    def enter(self, event: Event) -> None:
        """Check an event before its replay.

        Raises:
            PlanError: it comes too late. Nothing was replayed.
        """
        if not self._is_ordered:
            return
        if self._num_in_flight == 0:
            self._last = -1
        position = self._positions[event]
        if position <= self._last:
            raise PlanError(
                f"{event} came after an event that follows it in the captured order",
                where=event.region.name,
                fix="run forwards and backwards in the order of the first step",
            )
        self._last = position

    def started(self) -> None:
        """A forward ran whose backward is still to come."""
        self._num_in_flight += 1

    def finished(self) -> None:
        """A forward's backward ran, or its result was dropped."""
        self._num_in_flight -= 1


def lowest_free(busy: set[int]) -> int:
    """The lowest number that is not taken."""
    slot = 0
    while slot in busy:
        slot += 1
    return slot
