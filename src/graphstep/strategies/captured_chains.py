"""What has been captured for a model: found by signature, capped, the least used first to go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from graphstep.capture.chain import Chain
from graphstep.capture.plan import Variant
from graphstep.capture.region import Region
from graphstep.capture.signature import Signature
from graphstep.strategies.local_calls import RegionCalls

Hits = Mapping[tuple[Region, Signature], int]


class CapturedChains:
    """The chains of a model, by region and signature.

    Args:
        max_signatures: that a region has graphs for.
        capture_after: steps in which a further signature is seen before it is captured.
    """

    def __init__(self, max_signatures: int, capture_after: int) -> None:
        self._max_signatures = max_signatures
        self._capture_after = capture_after

    def add(self, chains: Iterable[Chain], regions: Mapping[Region, RegionCalls]) -> None:
        """Let the regions find new chains."""
        for chain in chains:
            for index, pair in enumerate(chain.pairs):
                calls = regions[pair.region]
                pair.owner = calls.current
                calls.links.setdefault(pair.signature, []).append((chain, index))
        _count(regions.values(), self._max_signatures)

    def worth_it(self, seen: Iterable[Variant], hits: Hits, regions: Mapping[Region, RegionCalls]) -> set[Variant]:
        """Choose what to capture among what was seen, and make room for it.

        What a region has no graphs for at all is captured at once; a further signature after ``capture_after`` steps. A
        full region gives up its least used signature for one that was seen more often than that one was replayed,
        and asks for more each time, so that a loop with ever new shapes does not capture for ever.
        """
        chosen: set[Variant] = set()
        num_new: dict[Region, int] = {}
        for variant in sorted(seen, key=lambda variant: -hits[variant.region, variant.signature]):
            calls = regions[variant.region]
            num_hits = hits[variant.region, variant.signature]
            if variant.signature in calls.links:
                if num_hits >= self._capture_after:
                    chosen.add(variant)  # More in flight than there are graphs for.
                continue
            if calls.is_captured and num_hits < self._capture_after * (1 + calls.stats.num_evictions):
                continue
            is_full = num_signatures(calls) + num_new.get(variant.region, 0) >= self._max_signatures
            if is_full and not self._evict_for(calls, num_hits, regions):
                continue
            num_new[variant.region] = num_new.get(variant.region, 0) + 1
            chosen.add(variant)
        return chosen

    def _evict_for(self, calls: RegionCalls, num_hits: int, regions: Mapping[Region, RegionCalls]) -> bool:
        """Drop the least used signature of a region with all that is chained to it, unless it is used more."""
        captured = [links for generation in calls.generations for links in generation.links.values()]
        if not captured:
            return False
        least = min(captured, key=_num_replays)
        chains = [chain for chain, _ in least]
        if _num_replays(least) >= num_hits or any(pair.num_in_flight for chain in chains for pair in chain.pairs):
            return False
        for chain in chains:
            self.drop(chain, regions)
        calls.stats.num_evictions += 1
        return True

    def drop_all(self, calls: RegionCalls, regions: Mapping[Region, RegionCalls]) -> None:
        """Forget everything that a region has graphs for."""
        calls.expect_nothing()
        for generation in calls.generations:
            for links in list(generation.links.values()):
                for chain, _ in list(links):
                    self.drop(chain, regions)
        calls.generations, calls.current = [], None

    def drop(self, chain: Chain, regions: Mapping[Region, RegionCalls]) -> None:
        """Forget a chain and close its recordings. The gradients stay where they are."""
        for pair in chain.pairs:
            calls = regions[pair.region]
            calls.starts = ()
            for generation in calls.generations:
                links = [link for link in generation.links.get(pair.signature, []) if link[0] is not chain]
                if links:
                    generation.links[pair.signature] = links
                else:
                    generation.links.pop(pair.signature, None)
            pair.release()
            chain.lane.drop(pair)
        _count(regions.values(), self._max_signatures)


def num_signatures(calls: RegionCalls) -> int:
    """How many signatures, each with certain attributes, a region has graphs for."""
    return sum(len(generation.links) for generation in calls.generations)


def _num_replays(links: Sequence[tuple[Chain, int]]) -> int:
    return sum(chain.pairs[index].num_replays for chain, index in links)


def _count(calls: Iterable[RegionCalls], max_signatures: int) -> None:
    for each in calls:
        each.stats.num_signatures = num_signatures(each)
        each.is_full = each.stats.num_signatures >= max_signatures
        captured = [links for generation in each.generations for links in generation.links.values()]
        each.stats.num_slots = max(map(len, captured), default=0)
