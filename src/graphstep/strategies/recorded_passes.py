"""What was seen of a model's layers before their capture: passes through the layers of a chunk, by signature."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from graphstep.capture.plan import Event, Key, Phase, Plan, Variant
from graphstep.capture.region import Region

T = TypeVar("T")


def inserted(order: Sequence[T], others: Sequence[T], rank: Callable[[T], int]) -> list[T]:
    """An order with what it lacks of another one: each behind the one that it follows there.

    Args:
        order: kept as it is.
        others: neither order has anything twice.
        rank: decides where the two leave it open.
    """
    made, place = list(order), 0
    for other in others:
        if other in made:
            place = made.index(other)
        else:
            while place < len(made) and made[place] not in others and rank(made[place]) < rank(other):
                place += 1
            made.insert(place, other)
        place += 1
    return made


class RecordedPasses:
    """Collects the passes that an observer has written into its plan.

    Args:
        chunk_of: the model chunk of each region, in the order in which the model has them.
    """

    def __init__(self, chunk_of: Mapping[Region, int]) -> None:
        self._chunk_of = chunk_of
        self._rank = {region: place for place, region in enumerate(chunk_of)}
        self._passes: dict[tuple[Variant, ...], list[Key]] = {}
        self._first_in: dict[Key, tuple[Variant, ...]] = {}
        """The pass that a call was first seen in: what its arguments were is known of that one."""
        self._trained: set[Key] = set()

    def trained_regions(self, plan: Plan) -> set[Region]:
        """Regions of which a forward and a backward was seen, in passes taken or in this plan."""
        return {variant.region for variant, _ in (*self._trained, *plan.trained())}

    def num_signatures(self) -> int:
        """The most signatures that a region was seen with."""
        counts: dict[Region, set[Variant]] = {}
        for variants in self._passes:
            for variant in variants:
                counts.setdefault(variant.region, set()).add(variant)
        return max(map(len, counts.values()), default=0)

    def take(self, plan: Plan) -> None:
        """Take the passes out of a plan: its events go, what is known of its calls stays there."""
        self._trained |= plan.trained()
        now: dict[int, list[Key]] = {}
        for event in plan.events:
            key, region = (event.variant, event.slot), event.variant.region
            if region not in self._chunk_of or key not in self._trained:
                continue
            keys = now.setdefault(self._chunk_of[region], [])
            # The layers of a microbatch run one after the other: with one that was there already, or after a backward,
            # the next one begins.
            if keys and (event.phase is not Phase.FORWARD or any(variant.region is region for variant, _ in keys)):
                self._add(keys)
                keys = now[self._chunk_of[region]] = []
            if event.phase is Phase.FORWARD:
                keys.append(key)
        for keys in filter(None, now.values()):
            self._add(keys)
        plan.events.clear()

    def _add(self, keys: list[Key]) -> None:
        variants = tuple(variant for variant, _ in keys)
        self._passes.setdefault(variants, keys)
        for key in keys:
            self._first_in.setdefault(key, variants)

    def plans(self, recorded: Plan, is_wanted: Callable[[Variant], bool], at_most: int) -> list[Plan]:
        """Plans of one microbatch each: for every chunk the layers with one signature, forward and back.

        Args:
            recorded: where the passes were taken from.
            is_wanted: true for signatures that are to come first.
            at_most: signatures of a layer.
        """
        found: dict[int, list[list[Key]]] = {}
        # The longest first, so that those that have skipped a layer are not what the order is taken from.
        for keys in sorted(
            self._passes.values(), key=lambda keys: (not all(is_wanted(v) for v, _ in keys), -len(keys))
        ):
            known = found.setdefault(self._chunk_of[keys[0][0].region], [])
            for number, layers in enumerate(known):
                if _belong_together(layers, keys):
                    known[number] = self._completed(layers, keys)
                    break
            else:
                if len(known) < at_most:
                    known.append(list(keys))
        return [
            self._plan(recorded, [each[number] for each in found.values() if number < len(each)])
            for number in range(max(map(len, found.values()), default=0))
        ]

    def _completed(self, layers: list[Key], others: list[Key]) -> list[Key]:
        """With the layers that this pass has skipped; each region stays there once."""
        known = {key[0]: key for key in layers}
        regions = {variant.region for variant in known}
        fitting = [known.get(key[0], key) for key in others if key[0] in known or key[0].region not in regions]
        return inserted(layers, fitting, lambda key: self._rank[key[0].region])

    def order_of(self, plans: Sequence[Plan]) -> dict[Region, int]:
        """Where each region of some plans stands among the layers of its chunk."""
        orders: dict[int, list[Region]] = {}
        for plan in plans:
            mine: dict[int, list[Region]] = {}
            for variant, _ in plan.calls:
                mine.setdefault(self._chunk_of[variant.region], []).append(variant.region)
            for chunk, regions in mine.items():
                orders[chunk] = inserted(orders.get(chunk, []), regions, self._rank.__getitem__)
        return {region: place for regions in orders.values() for place, region in enumerate(regions)}

    def _plan(self, recorded: Plan, chunks: Sequence[Sequence[Key]]) -> Plan:
        made = Plan(reused=set(recorded.reused))
        for keys in chunks:
            made.events += [Event(*key, Phase.FORWARD) for key in keys]
            made.events += [Event(*key, Phase.BACKWARD) for key in reversed(keys)]
            pass_now = tuple(variant for variant, _ in keys)
            for key in keys:
                call = recorded.calls[key]
                if self._first_in[key] != pass_now:
                    # Where its arguments come from in this pass was not noted.
                    call = replace(call, origins=(None,) * len(call.origins), follows=None)
                made.calls[key] = call
        return made


def _belong_together(some: Sequence[Key], others: Sequence[Key]) -> bool:
    """True for passes that differ in which layers they skip, not in the signatures of layers that both have."""
    shared = {variant.region for variant, _ in some} & {variant.region for variant, _ in others}
    return not shared or bool({variant for variant, _ in some} & {variant for variant, _ in others})


def joined(plans: Iterable[Plan]) -> Plan:
    """One plan after the other, for the same slots: never two of them in flight in one slot."""
    made = Plan()
    for plan in plans:
        made.events += plan.events
        made.calls.update(plan.calls)
        made.reused |= plan.reused
    return made
