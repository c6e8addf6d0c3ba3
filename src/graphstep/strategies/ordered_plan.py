"""A plan that comes from a schedule: which layers run is taken from a recorded microbatch, in which order is not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graphstep.capture.chain import Handover
from graphstep.capture.plan import Event, Key, ObservedCall, Origin, Phase, Plan, Variant, lowest_free
from graphstep.capture.region import Region
from graphstep.strategies.order_steps import OrderStep, max_in_flight


@dataclass(slots=True)
class OrderedPlan:
    """What to capture."""

    plan: Plan
    handovers: dict[Key, Handover] = field(default_factory=dict)
    num_slots: tuple[int, ...] = ()
    """Microbatches in flight of each chunk."""


def ordered_plan(
    recorded: Plan,
    handovers: Mapping[Key, Handover],
    chunk_of: Mapping[Region, int],
    steps: Sequence[OrderStep],
) -> OrderedPlan:
    """The plan of a schedule.

    Args:
        recorded: a step in which each layer ran forward and backward at least once; its first microbatch counts.
        handovers: of that step.
        chunk_of: the model chunk of each region.
        steps: the schedule.

    Returns:
        For each forward of the schedule the layers of its chunk in the recorded order, in the lowest slot that is free,
        and for each backward, and for weight gradients of their own, the same the other way round. So there are as many
        slots as microbatches in flight.
    """
    layers = _layers_of(recorded, chunk_of)
    found = OrderedPlan(
        Plan(reused=set(recorded.reused)), {}, tuple(_depth(steps, chunk) for chunk in range(len(layers)))
    )
    slots: dict[tuple[int, int], int] = {}
    last_phase = Phase.WEIGHT_GRADIENT if any(s.phase is Phase.WEIGHT_GRADIENT for s in steps) else Phase.BACKWARD
    for step in steps:
        keys = layers[step.chunk] if step.chunk < len(layers) else []
        place = step.chunk, step.microbatch
        if step.phase is Phase.FORWARD:
            slots[place] = lowest_free([slot for (chunk, _), slot in slots.items() if chunk == step.chunk])
            for key in keys:
                _add_forward(found, recorded.calls[key], handovers.get(key), key, slots[place], set(keys))
        else:
            found.plan.events += [Event(variant, slots[place], step.phase) for variant, _ in reversed(keys)]
            if step.phase is last_phase:
                del slots[place]
    return found


def _layers_of(recorded: Plan, chunk_of: Mapping[Region, int]) -> list[list[Key]]:
    """For each chunk, the first recorded call of each layer, in order."""
    trained = recorded.trained()
    layers: list[dict[Region, Key]] = [{} for _ in range(1 + max(chunk_of.values(), default=-1))]
    for event in recorded.events:
        key = event.variant, event.slot
        if event.phase is Phase.FORWARD and key in trained and event.variant.region in chunk_of:
            layers[chunk_of[event.variant.region]].setdefault(event.variant.region, key)
    return [list(found.values()) for found in layers]


def _add_forward(
    found: OrderedPlan, call: ObservedCall, handover: Handover | None, key: Key, slot: int, known: set[Key]
) -> None:
    variant, _ = key
    found.plan.events.append(Event(variant, slot, Phase.FORWARD))

    def moved(other: Key | None) -> tuple[Variant, int] | None:
        return (other[0], slot) if other in known and other is not None else None

    found.plan.calls.setdefault(
        (variant, slot),
        ObservedCall(
            tuple(
                Origin(origin.variant, slot, origin.output)
                if origin is not None and (origin.variant, origin.slot) in known
                else None
                for origin in call.origins
            ),
            call.addresses,
            call.refusal,
            call.used,
            call.samples,
            moved(call.follows),
        ),
    )
    if handover is not None:
        found.handovers[variant, slot] = handover


def _depth(steps: Sequence[OrderStep], chunk: int) -> int:
    return max_in_flight(steps).get(chunk, 0)
