"""Plans of a step in shorthand: ``"0f 1f 1b 0b"``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch

from graphstep.capture.plan import Event, Key, Phase, Plan, PlanObserver, Variant
from graphstep.capture.region import Region
from graphstep.capture.signature import Signature


def region(name: str) -> Region:
    return Region(name, "layer", lambda x: x, ())


R: Final = tuple(region(f"layers.{index}") for index in range(3))
SIGNATURE: Final = Signature.of((torch.zeros(2),), device_type="cpu")
LONGER: Final = Signature.of((torch.zeros(5),), device_type="cpu")


def observe(order: str, observer: PlanObserver | None = None) -> Plan:
    """Forwards and backwards of regions, with upper-case letters for the longer shape.

    Backwards take the oldest open slot, or ``0b1`` slot 1. Regions with weight gradients of their own (``0w``) are open
    until those, which come in the order of the backwards.
    """
    observer = observer or PlanObserver()
    open_keys: dict[tuple[str, bool], list[Key]] = {}
    delayed: dict[str, list[Key]] = {word[0]: [] for word in order.split() if word[1] == "w"}
    for word in order.split():
        index, phase, slot = word[0], word[1], word[2:]
        waiting = open_keys.setdefault((index, phase.isupper()), [])
        if phase in "fF":
            signature = LONGER if phase == "F" else SIGNATURE
            waiting.append(observer.forward(R[int(index)], signature, [torch.zeros(2)]))
        elif phase == "w":
            observer.weight_gradients(*delayed[index].pop(0))
        else:
            taken = next(key for key in waiting if not slot or key[1] == int(slot))
            waiting.remove(taken)
            observer.backward(*taken, is_last=index not in delayed)
            delayed.get(index, []).append(taken)
    return observer.plan


def variant(plan: Plan, index: int, signature: Signature = SIGNATURE) -> Variant:
    """What was observed of a region with a signature."""
    wanted = R[index], signature
    return next(e.variant for e in plan.events if (e.variant.region, e.variant.signature) == wanted)


def event(plan: Plan, word: str) -> Event:
    """``"1b0"``: the backward of region 1 in slot 0, as in the plan."""
    signature = LONGER if word[1].isupper() else SIGNATURE
    phase = Phase.FORWARD if word[1] in "fF" else Phase.BACKWARD
    return Event(variant(plan, int(word[0]), signature), int(word[2:] or 0), phase)


def words(events: Iterable[Event]) -> str:
    """What :func:`observe` was given, each with its slot."""
    return " ".join(map(_word, events))


def _word(event: Event) -> str:
    letter = "f" if event.phase is Phase.FORWARD else "b"
    is_longer = event.variant.signature == LONGER
    return f"{R.index(event.variant.region)}{letter.upper() if is_longer else letter}{event.slot}"
