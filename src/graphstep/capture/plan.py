"""The order in which regions run, as it was observed."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Collection, Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from graphstep.capture.region import Region
from graphstep.capture.signature import Signature


class Phase(enum.Enum):
    """What runs of a graph pair, or of a model chunk."""

    FORWARD = "forward"
    """Computes the outputs, and keeps what the backward needs."""
    BACKWARD = "backward"
    """Computes the gradients of the inputs, and those of the weights unless they are computed apart."""
    WEIGHT_GRADIENT = "weight gradients"
    """Computes the gradients of the weights, some time after the backward."""


@dataclass(frozen=True, slots=True, eq=False)
class Variant:
    """A region called with one signature. Compared by identity: a plan has one for each."""

    region: Region
    signature: Signature = field(repr=False)


@dataclass(frozen=True, slots=True)
class Event:
    """One run of one half of a variant's pair."""

    variant: Variant
    slot: int
    """Which of the microbatches in flight, from 0."""
    phase: Phase

    def __str__(self) -> str:
        return f"{self.phase.value} of {self.variant.region.name} (slot {self.slot})"


@dataclass(frozen=True, slots=True)
class Origin:
    """An output of a region: which variant, which slot, which of its output tensors."""

    variant: Variant
    slot: int
    output: int


@dataclass(slots=True)
class ObservedCall:
    """How a region was called in the observed step."""

    origins: tuple[Origin | None, ...]
    """Where each argument tensor came from, if from another region."""
    addresses: tuple[int, ...]
    refusal: str = ""
    """What among the arguments a graph cannot stand for."""
    used: set[int] | None = None
    """Which of its results got a gradient; ``None`` where that is not known, and all count."""
    samples: tuple[Tensor, ...] = ()
    """Values of the arguments for the warmup; zeros where there are none."""
    follows: tuple[Variant, int] | None = None
    """The variant and slot of the call just before, if this one got its results, all else as that one had it, and
    nobody else uses those results: the two can be replayed as one."""


Key = tuple[Variant, int]
"""A variant and a slot: what has one graph pair."""


@dataclass(slots=True)
class Plan:
    """Events of one step in order; each (variant, slot) is captured at its first forward and first backward."""

    events: list[Event] = field(default_factory=list)
    calls: dict[Key, ObservedCall] = field(default_factory=dict)
    reused: set[Region] = field(default_factory=set)
    """Regions that ran several times before one and the same backward pass: their gradients belong together."""

    def first_events(self) -> list[Event]:
        """The events without repetitions: the order of capture."""
        return list(dict.fromkeys(self.events))

    def trained(self) -> KeysView[Key]:
        """Variants and slots whose backward was seen, in that order."""
        keys = ((event.variant, event.slot) for event in self.events if event.phase is Phase.BACKWARD)
        return dict.fromkeys(keys).keys()

    def delayed(self) -> KeysView[Key]:
        """Variants and slots whose weight gradients are computed apart from their backward, in that order."""
        keys = ((event.variant, event.slot) for event in self.events if event.phase is Phase.WEIGHT_GRADIENT)
        return dict.fromkeys(keys).keys()

    def last_phase(self) -> Mapping[Key, Phase]:
        """For each variant and slot what frees its memory."""
        delayed = self.delayed()
        return {key: Phase.WEIGHT_GRADIENT if key in delayed else Phase.BACKWARD for key in self.trained()}

    def only(self, variants: Collection[Variant]) -> Plan:
        """The part of the plan that is about some variants."""
        trained = self.trained()
        kept = {key for key in self.calls if key in trained and key[0] in variants}
        return Plan(
            [event for event in self.events if (event.variant, event.slot) in kept],
            {key: call for key, call in self.calls.items() if key in kept},
            self.reused,
        )


class PlanObserver:
    """Writes a plan while calls run eagerly."""

    def __init__(self) -> None:
        self.plan = Plan()
        self._variants: dict[tuple[Region, Signature], Variant] = {}
        self._in_flight: dict[Variant, set[int]] = {}
        self._last_pass: dict[Region, int] = {}
        self._origins: dict[int, tuple[weakref.ref[Tensor], Origin]] = {}

    @property
    def num_in_flight(self) -> int:
        """Observed forwards whose backward may still come."""
        return sum(map(len, self._in_flight.values()))

    def forward(
        self, region: Region, signature: Signature, inputs: Sequence[Tensor], *, taken: Iterable[int] = ()
    ) -> Key:
        """Note a forward before it runs.

        Args:
            region: what runs.
            signature: of the call.
            inputs: the argument tensors, flat.
            taken: slots that have graphs already and are not to be observed again.

        Returns:
            Its variant, and its slot: that of the region that made its arguments if it is free, else the lowest.
        """
        variant = self._variants.setdefault((region, signature), Variant(region, signature))
        busy = self._in_flight.setdefault(variant, set())
        origins = tuple(self._origin_of(tensor) for tensor in inputs)
        not_free = busy.union(taken)
        inherited = [origin.slot for origin in origins if origin is not None and origin.slot not in not_free]
        slot = inherited[0] if inherited else lowest_free(not_free)
        busy.add(slot)
        self.plan.events.append(Event(variant, slot, Phase.FORWARD))
        call = ObservedCall(origins, tuple(tensor.data_ptr() for tensor in inputs))
        self.plan.calls.setdefault((variant, slot), call)
        return variant, slot

    def outputs(self, variant: Variant, slot: int, outputs: Sequence[Tensor]) -> None:
        """Note what the forward returned."""
        for index, tensor in enumerate(outputs):
            self._origins[id(tensor)] = (weakref.ref(tensor), Origin(variant, slot, index))

    def backward(self, variant: Variant, slot: int, backward_pass: int | None = None, *, is_last: bool = True) -> None:
        """Note that the backward of a variant begins, in which backward pass of autograd.

        ``is_last``: no weight gradients come later.
        """
        busy = self._in_flight.get(variant, set())
        if slot in busy:
            if is_last:
                busy.discard(slot)
            region = variant.region
            self.plan.events.append(Event(variant, slot, Phase.BACKWARD))
            if backward_pass is not None and self._last_pass.get(region) == backward_pass:
                self.plan.reused.add(region)
            if backward_pass is not None:
                self._last_pass[region] = backward_pass

    def weight_gradients(self, variant: Variant, slot: int) -> None:
        """Note that the weight gradients of a variant are computed, after its backward."""
        self._in_flight.get(variant, set()).discard(slot)
        self.plan.events.append(Event(variant, slot, Phase.WEIGHT_GRADIENT))

    def dropped(self, variant: Variant, slot: int) -> None:
        """Note that no backward will come for a forward: its result is gone. It is no part of the plan."""
        busy = self._in_flight.get(variant, set())
        if slot not in busy:
            return
        busy.discard(slot)
        event = Event(variant, slot, Phase.FORWARD)
        if event not in self.plan.events:
            return  # The plan was taken meanwhile.
        position = len(self.plan.events) - 1 - self.plan.events[::-1].index(event)
        del self.plan.events[position]
        if event not in self.plan.events:
            del self.plan.calls[variant, slot]

    def _origin_of(self, tensor: Tensor) -> Origin | None:
        found = self._origins.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None


def lowest_free(busy: Collection[int]) -> int:
    """The lowest number that is not taken."""
    slot = 0
    while slot in busy:
        slot += 1
    return slot
