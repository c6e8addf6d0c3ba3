"""Which signatures get graphs, and which have to go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
import torch
from tests.capture.pairs import captured, chain_of, linked
from torch import Tensor

from graphstep.capture.chain import Chain
from graphstep.capture.garbage import collected_once
from graphstep.capture.plan import PlanObserver, Variant
from graphstep.capture.region import Region
from graphstep.capture.session import GraphSession
from graphstep.capture.signature import Signature
from graphstep.config import MismatchPolicy
from graphstep.strategies.captured_chains import CapturedChains
from graphstep.strategies.local_calls import RegionCalls
from graphstep.strategies.local_observed import ObservedCalls


class Host:
    """Nobody asks it for anything: no call is made here."""

    def __init__(self, device: torch.device) -> None:
        self.observer: PlanObserver | None = None
        self.observed = ObservedCalls()
        self.on_mismatch = MismatchPolicy.recapture
        self.device_type = device.type
        self.is_debugging = self.is_capturing = False


class Model:
    """Regions with chains of their own for some lengths, made as they are wanted."""

    def __init__(
        self, session: GraphSession, num_regions: int = 1, *, max_signatures: int = 2, capture_after: int = 2
    ) -> None:
        self.session = session
        self.chains = CapturedChains(max_signatures, capture_after)
        self.hits: Counter[tuple[Region, Signature]] = Counter()
        host = Host(session.device)
        self.regions: dict[Region, RegionCalls] = {}
        for index in range(num_regions):
            region = Region(f"layers.{index}", "layer", torch.sin, ())
            self.regions[region] = RegionCalls(region, (), host, session.stats(region.name, "layer"))

    @property
    def first(self) -> RegionCalls:
        return next(iter(self.regions.values()))

    def example(self, length: int) -> Tensor:
        return torch.ones(length, device=self.session.device, requires_grad=True)

    def signature(self, length: int) -> Signature:
        return Signature.of(((self.example(length),), {}), device_type=self.session.device.type)

    def variant(self, length: int, region: int = 0) -> Variant:
        return Variant(list(self.regions)[region], self.signature(length))

    def add(self, length: int, *, num_replays: int = 0) -> Chain:
        """One slot for a length, in all regions."""
        with collected_once():
            chain = linked(self.session, [torch.sin] * len(self.regions), self.example(length))
        for pair, region in zip(chain.pairs, self.regions, strict=True):
            pair.region, pair.num_replays = region, num_replays
        for calls in self.regions.values():
            calls.note_attributes()
        self.chains.add([chain], self.regions)
        return chain

    def choose(self, seen: dict[int, int]) -> set[int]:
        """Which lengths are worth it, after they were seen in so many steps."""
        variants = {length: self.variant(length) for length in seen}
        for length, num in seen.items():
            self.hits[variants[length].region, variants[length].signature] = num
        chosen = self.chains.worth_it(variants.values(), self.hits, self.regions)
        return {length for length, variant in variants.items() if variant in chosen}

    def lengths(self, calls: RegionCalls | None = None) -> list[int]:
        links = (calls or self.first).links
        return [signature.layouts[0].shape[0] for signature in links]


@pytest.fixture
def session(device: torch.device) -> Iterator[GraphSession]:
    with GraphSession(device) as opened:
        yield opened


def test_a_region_finds_its_chains_by_signature(session: GraphSession) -> None:
    model = Model(session, 2)
    chains = [model.add(4), model.add(4), model.add(5)]
    for index, calls in enumerate(model.regions.values()):
        assert calls.links[model.signature(4)] == [(chains[0], index), (chains[1], index)]
        assert calls.links[model.signature(5)] == [(chains[2], index)]
        assert (calls.stats.num_signatures, calls.stats.num_slots, calls.is_full) == (2, 2, True)


def test_what_is_added_is_not_held(session: GraphSession) -> None:
    model = Model(session)
    chain = model.add(4)
    assert not any(pair.is_held() for pair in chain.pairs)


def test_full_means_as_many_signatures_as_are_allowed(session: GraphSession) -> None:
    model = Model(session, max_signatures=3)
    fullness = []
    for length in (2, 2, 3, 4):
        model.add(length)
        fullness.append(model.first.is_full)
    assert fullness == [False, False, False, True]


def test_what_has_no_graphs_is_captured_at_once(session: GraphSession) -> None:
    assert Model(session).choose({4: 1}) == {4}


def test_the_most_frequent_of_the_first_ones_are_captured(session: GraphSession) -> None:
    assert Model(session).choose({2: 1, 3: 5, 4: 1, 5: 3}) == {3, 5}


@pytest.mark.parametrize(
    ("capture_after", "num_seen", "chosen"), [(2, 1, set()), (2, 2, {5}), (4, 3, set()), (1, 1, {5})]
)
def test_a_further_signature_has_to_be_seen_more_often(
    session: GraphSession, capture_after: int, num_seen: int, chosen: set[int]
) -> None:
    model = Model(session, capture_after=capture_after)
    model.add(4)
    assert model.choose({5: num_seen}) == chosen
    assert model.lengths() == [4]


@pytest.mark.parametrize(("num_seen", "chosen"), [(1, set()), (2, {4})])
def test_more_in_flight_has_to_be_seen_as_often(session: GraphSession, num_seen: int, chosen: set[int]) -> None:
    model = Model(session, max_signatures=1)
    model.add(4)
    assert model.choose({4: num_seen}) == chosen
    assert model.lengths() == [4]
    assert model.first.stats.num_evictions == 0


def test_each_region_has_its_own_limits(session: GraphSession) -> None:
    model = Model(session, 2, max_signatures=1)
    chain = chain_of(captured(session, torch.sin, model.example(4)))
    first, second = model.regions
    chain.pairs[0].region, chain.pairs[0].num_replays = first, 9
    for calls in model.regions.values():
        calls.note_attributes()
    model.chains.add([chain], model.regions)
    variants = [model.variant(5, 0), model.variant(5, 1)]
    hits = Counter({(variant.region, variant.signature): 2 for variant in variants})
    assert model.chains.worth_it(variants, hits, model.regions) == {variants[1]}
    assert model.regions[second].links == {}


def test_the_least_used_makes_room(session: GraphSession) -> None:
    model = Model(session)
    model.add(2, num_replays=5)
    model.add(3, num_replays=1)
    assert model.choose({4: 3}) == {4}
    assert model.lengths() == [2]
    assert model.first.stats.num_evictions == 1
    assert (model.first.stats.num_signatures, model.first.is_full) == (1, False)


def test_replays_of_all_slots_count(session: GraphSession) -> None:
    model = Model(session)
    model.add(2, num_replays=2)
    model.add(2, num_replays=2)
    model.add(3, num_replays=3)
    assert model.choose({4: 4}) == {4}
    assert model.lengths() == [2]


def test_what_is_used_more_stays(session: GraphSession) -> None:
    model = Model(session)
    model.add(2, num_replays=5)
    model.add(3, num_replays=4)
    assert model.choose({4: 4}) == set()
    assert model.lengths() == [2, 3]
    assert model.first.stats.num_evictions == 0


def test_what_is_in_flight_stays(session: GraphSession) -> None:
    model = Model(session, max_signatures=1)
    chain = model.add(2)
    chain.pairs[0].num_in_flight = 1
    assert model.choose({4: 4}) == set()
    chain.pairs[0].num_in_flight = 0
    assert model.choose({4: 4}) == {4}


def test_each_eviction_asks_for_more(session: GraphSession) -> None:
    """A loop with ever new shapes does not capture for ever."""
    model = Model(session, max_signatures=1)
    needed = []
    for length in (2, 3, 4, 5):
        num_seen = next(num for num in range(1, 20) if model.choose({length: num}) == {length})
        needed.append(num_seen)
        model.add(length)
    assert needed == [1, 2, 4, 6]


def test_several_new_ones_do_not_exceed_the_limit(session: GraphSession) -> None:
    model = Model(session, max_signatures=3)
    model.add(2, num_replays=100)
    assert model.choose({3: 2, 4: 4, 5: 3, 6: 2}) == {4, 5}
    assert model.lengths() == [2]


def test_an_eviction_drops_the_whole_chain(session: GraphSession) -> None:
    model = Model(session, 2, max_signatures=1)
    chain = model.add(2)
    recordings = [each for pair in chain.pairs for each in (pair.forward, pair.backward)]
    assert model.choose({4: 3}) == {4}
    assert [model.lengths(calls) for calls in model.regions.values()] == [[], []]
    assert [calls.stats.num_evictions for calls in model.regions.values()] == [1, 0]
    with pytest.raises(Exception, match="closed"):
        recordings[0].replay()


def test_a_dropped_chain_leaves_the_other_slots(session: GraphSession) -> None:
    model = Model(session)
    chains: Sequence[Chain] = [model.add(2), model.add(2), model.add(3)]
    before = _num_recordings(session)
    model.chains.drop(chains[0], model.regions)
    assert model.first.links[model.signature(2)] == [(chains[1], 0)]
    assert (model.first.stats.num_slots, model.first.stats.num_signatures) == (1, 2)
    assert _num_recordings(session) == before - 2
    model.chains.drop(chains[1], model.regions)
    assert model.lengths() == [3]


def test_a_chain_is_dropped_once(session: GraphSession) -> None:
    model = Model(session)
    chain = model.add(2)
    model.chains.drop(chain, model.regions)
    assert model.first.links == {}
    assert _num_recordings(session) == 0


def _num_recordings(session: GraphSession) -> int:
    return sum(row.num_recordings for row in session.report().rows)
