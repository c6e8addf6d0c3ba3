"""Who shares memory, and which forward halves may run while others are in flight."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.capture.plans import R, event, observe, variant

from graphstep.capture.lanes import Lane, Lanes, Span, delayed_lanes, lane_groups
from graphstep.capture.plan import Key, Phase, Plan


@dataclass
class Captured:
    """What a capture of a plan leaves behind: positions, and the lane of each variant and slot."""

    plan: Plan
    lanes: Lanes = field(default_factory=Lanes)
    positions: dict[Key, list[int]] = field(default_factory=dict)
    in_flight: dict[Key, Span] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.groups = lane_groups(self.plan)
        for each in self.plan.first_events():
            self.positions.setdefault((each.variant, each.slot), []).append(self.lanes.tick())

    def lane(self, key: Key) -> Lane:
        return self.lanes.of(self.groups[key[0]], key[1])

    def allows(self, word: str) -> bool:
        """True if the forward may run."""
        asked = event(self.plan, word)
        key = asked.variant, asked.slot
        return self.lane(key).allows(self.positions[key][0])

    def run(self, order: str) -> list[str]:
        """Replay what may be replayed, and give the rest. Backwards come without a question."""
        refused = []
        for word in order.split():
            each = event(self.plan, word)
            key = each.variant, each.slot
            if each.phase is Phase.BACKWARD:
                if key in self.in_flight:
                    self.lane(key).leave(self.in_flight.pop(key))
            elif self.allows(word):
                self.in_flight[key] = Span(*self.positions[key])
                self.lane(key).enter(self.in_flight[key])
            else:
                refused.append(word)
        return refused


@pytest.mark.parametrize(
    ("order", "num_groups"),
    [
        ("", 0),
        ("0f 1f 2f 2b 1b 0b", 1),
        ("0f 1f 1b 0b 0f 1f 1b 0b", 1),
        ("0f 1f 1b 0b 2f 2b", 1),
        ("0f 1f 0b 1b", 2),
        ("2f 0f 1f 2b 1b 0b", 2),
        # Of a backward that came, its forward was the last that waited: 1 never did.
        ("0f 1f 2f 2b 0b", 2),
        # A slot by itself is one microbatch after another, in whatever order the slots end.
        ("0f 0f 0b1 0b0", 1),
        ("0f 1f 0f 1f 1b0 0b0 1b1 0b1", 1),
        ("0f 1f 0f 1f 1b1 0b1 1b0 0b0", 1),
        # 1F1B with two in flight.
        ("0f 1f 0f 1f 1b 0b 0f 1f 1b1 0b1 1b 0b", 1),
        # Interleaved virtual stages: one chunk goes on to other microbatches before the other has finished.
        ("0f 0f 1f 1f 1b0 1b1 0b0 0b1", 1),
        ("0f 0f 1f 0b0 1b0 0b1", 2),
        ("0f 1f 2f 0b 1b 2b", 3),
        # Two shapes.
        ("0f 1f 1b 0b 0F 1F 1B 0B", 1),
        ("0f 0F 0B 0b", 1),
        ("0f 0F 0b 0B", 2),
    ],
)
def test_memory_is_shared_by_what_is_nested_within_a_slot(order: str, num_groups: int) -> None:
    groups = lane_groups(observe(order))
    assert set(groups.values()) == set(range(num_groups))


def test_an_interleaved_schedule_has_a_group_for_each_chunk() -> None:
    plan = observe("0f 1f 2f 1b 0b 2b")
    groups = lane_groups(plan)
    assert groups[variant(plan, 0)] == groups[variant(plan, 1)] == 0
    assert groups[variant(plan, 2)] == 1


@pytest.mark.parametrize("order", ["0f 1f 1b 0b", "0f 1f 1b 0b 0f 1f 1b 0b", "1f 1b 0f 0b", "0f 0b", "0f 1f 0b 1b"])
def test_the_planned_order_and_parts_of_it_are_allowed(order: str) -> None:
    """Backwards in any order: they take nothing from the lane."""
    assert Captured(observe("0f 1f 1b 0b")).run(order) == []


@pytest.mark.parametrize(("order", "refused"), [("1f 0f", ["0f"]), ("0f 0f", ["0f"]), ("0f 1f 0b 0f", ["0f"])])
def test_another_order_is_refused_where_memory_is_shared(order: str, refused: list[str]) -> None:
    assert Captured(observe("0f 1f 1b 0b")).run(order) == refused


@pytest.mark.parametrize(
    ("plan", "in_flight", "asked", "may_run"),
    [
        ("0f 1f 2f 2b 1b 0b", "", "2f", True),
        ("0f 1f 2f 2b 1b 0b", "0f", "2f", True),
        ("0f 1f 2f 2b 1b 0b", "0f 1f", "0f", False),
        ("0f 1f 2f 2b 1b 0b", "1f", "0f", False),
        ("0f 1f 2f 2b 1b 0b", "2f", "1f", False),
        ("0f 1f 2f 2b 1b 0b", "0f 2f 2b", "1f", True),
        ("0f 1f 1b 0b 2f 2b", "0f", "2f", False),
        ("0f 1f 1b 0b 2f 2b", "0f 0b", "1f", True),
        ("0f 1f 1b 0b 2f 2b", "0f 1f 1b", "2f", False),
        ("0f 1f 1b 0b 2f 2b", "0f 1f 1b 0b", "2f", True),
        # Groups of their own: nothing is shared.
        ("0f 1f 0b 1b 2f 2b", "0f 1f 0b", "2f", True),
        ("0f 1f 0b 1b", "1f", "0f", True),
        # Each slot has memory of its own.
        ("0f 0f 0b 0b", "0f0", "0f1", True),
        ("0f 0f 0b 0b", "0f1", "0f0", True),
        ("0f 0f 0b 0b", "0f0 0f1 0b0", "0f0", True),
        ("0f 1f 0f 1f 1b0 0b0 1b1 0b1", "0f1 1f1", "0f0", True),
        ("0f 1f 0f 1f 1b0 0b0 1b1 0b1", "0f1 1f1", "0f1", False),
        # The second shape uses what the first needs no more.
        ("0f 1f 1b 0b 0F 1F 1B 0B", "0f", "0F", False),
        ("0f 1f 1b 0b 0F 1F 1B 0B", "0f 1f 1b 0b", "0F", True),
        ("0f 1f 1b 0b 0F 1F 1B 0B", "0F", "1f", False),
        ("0f 1f 1b 0b 0F 1F 1B 0B", "0F", "1F", True),
        ("0f 0F 0B 0b", "0f", "0F", True),
        ("0f 0F 0B 0b", "0F", "0f", False),
    ],
)
def test_a_forward_runs_only_while_what_is_in_flight_was_so_at_the_capture(
    plan: str, in_flight: str, asked: str, may_run: bool
) -> None:
    captured = Captured(observe(plan))
    assert captured.run(in_flight) == []
    assert captured.allows(asked) is may_run


def test_a_refused_forward_changes_nothing() -> None:
    captured = Captured(observe("0f 1f 1b 0b"))
    assert captured.run("0f 1f 0f") == ["0f"]
    assert captured.run("1b 0b 0f 1f 1b 0b") == []


@pytest.mark.parametrize("order", ["0f0 0f1 0b1 0b0", "0f1 0b1 0f0 0b0", "0f0 0b0 0f0 0b0"])
def test_any_order_is_safe_with_several_in_flight(order: str) -> None:
    assert Captured(observe("0f 0f 0b 0b")).run(order) == []


def test_a_run_that_goes_on_keeps_out_what_was_captured_before_its_latest_forward() -> None:
    lane, span = Lane(), Span(0, 9)
    lane.enter(span)
    assert lane.allows(3)
    span.forward_position, span.backward_position = 4, 5
    assert not lane.allows(3)
    assert not lane.allows(4)
    assert not lane.allows(6)
    lane.leave(span)
    assert lane.allows(3)


def test_the_latest_is_what_entered_last_and_is_still_in_flight() -> None:
    lane, first, second = Lane(), Span(0, 9), Span(1, 8)
    assert lane.latest is None
    lane.enter(first)
    lane.enter(second)
    assert lane.latest is second
    lane.leave(first)
    lane.leave(first)
    assert lane.latest is second
    lane.leave(second)
    assert lane.latest is None
    lane.enter(first)
    lane.leave(second)
    assert lane.latest is first


def test_lanes_are_made_once_and_the_clock_goes_on() -> None:
    lanes = Lanes()
    assert lanes.of(0, 1) is lanes.of(0, 1)
    assert len({id(lanes.of(group, slot)) for group in range(2) for slot in range(2)}) == 4
    assert [lanes.tick() for _ in range(3)] == [0, 1, 2]


words = st.lists(st.sampled_from(["0", "1", "2"]), min_size=1, max_size=8)


@given(words, st.lists(st.sampled_from(["0f", "0b", "1f", "1b", "2f", "2b"]), max_size=16))
def test_what_may_run_overwrites_nothing_in_flight(toggled: list[str], replayed: list[str]) -> None:
    """A model of the pool: each forward takes scratch, free after it, and saved memory, free after its backward."""
    order, waiting = [], set[str]()
    for word in toggled:  # Each time a region is named, its other half comes.
        order.append(word + ("b" if word in waiting else "f"))
        waiting ^= {word}
    order += [word + "b" for word in sorted(waiting)]
    captured = Captured(observe(" ".join(order)))
    taken: dict[int, set[int]] = {}
    saved: dict[Key, int] = {}
    written: dict[Key, set[int]] = {}
    for each in captured.plan.first_events():
        key, busy = (each.variant, each.slot), taken.setdefault(captured.groups[each.variant], set())
        if each.phase is Phase.FORWARD:
            scratch, kept = [block for block in range(20) if block not in busy][:2]
            busy.add(kept)
            saved[key], written[key] = kept, {scratch, kept}
        else:
            busy.discard(saved[key])
    in_use: set[Key] = set()
    for word in replayed:
        if word[0] not in toggled:
            continue
        each = event(captured.plan, word)
        key = each.variant, 0
        if each.phase is Phase.BACKWARD:
            in_use.discard(key)
        elif captured.allows(word):
            same = [other for other in in_use if captured.groups[other[0]] == captured.groups[key[0]]]
            assert not written[key] & {saved[other] for other in same}
            in_use.add(key)
        captured.run(word)


# Weight gradients with turns of their own.


@pytest.mark.parametrize(
    ("order", "num_groups"),
    [
        ("0f 1f 1b 0b 1w 0w", 1),
        ("0f 1f 1b 1w 0b 0w", 1),
        ("0f 1f 1b 0b 0w 1w", 2),  # What 1 has saved stays longer than what 0 has.
        ("0f 0b 1f 1b 0w 1w", 2),
        ("0f 1f 1b 0b 0w", 1),
    ],
)
def test_memory_of_a_forward_is_free_after_its_weight_gradients(order: str, num_groups: int) -> None:
    assert set(lane_groups(observe(order)).values()) == set(range(num_groups))


@pytest.mark.parametrize(
    ("order", "num_lanes"),
    [
        ("0f 0b 0w", 1),
        ("0f 1f 1b 0b 1w 0w", 1),
        ("0f 0f 0b 0b 0w 0w", 2),  # One for each slot.
        ("0f 1f 1b 0b 0w 1w", 2),  # One for each group.
        (
            "0f 1f 1b 1w 0b 0w 0f 1f 1b 0b 1w 0w",
            2,
        ),  # Later in the step, 0 comes between the backward of 1 and the rest.
        ("0f 0b", 0),
    ],
)
def test_what_a_backward_leaves_for_the_weight_gradients_is_shared_where_nothing_comes_between(
    order: str, num_lanes: int
) -> None:
    plan = observe(order)
    assert len(set(delayed_lanes(plan, lane_groups(plan)).values())) == num_lanes


@st.composite
def orders(draw: st.DrawFn) -> str:
    """Forwards, backwards and weight gradients of three regions, two of which compute the latter apart."""
    counts = {(index, phase): 0 for index in "012" for phase in "fbw"}
    found = []

    def add(index: str, phase: str) -> None:
        before = {"b": "f", "w": "b"}.get(phase)
        if (index != "2" or phase != "w") and (before is None or counts[index, phase] < counts[index, before]):
            counts[index, phase] += 1
            found.append(index + phase)

    for index, phase in draw(st.lists(st.tuples(st.sampled_from("012"), st.sampled_from("ffbbww")), max_size=24)):
        add(index, phase)
    for phase in "bw":
        for _ in range(len(found)):
            for index in "012":
                add(index, phase)
    return " ".join(found)


@given(orders())
def test_a_step_with_weight_gradients_overwrites_nothing_that_is_still_to_be_read(order: str) -> None:
    """A model of the pool: forward and backward halves take scratch, and memory until the last of them has run."""
    plan = observe(order)
    groups = lane_groups(plan, {R[index]: index for index in range(3)})
    delayed = delayed_lanes(plan, groups)
    last_phase = plan.last_phase()
    taken: dict[Hashable, set[int]] = {}
    kept: dict[tuple[Key, Phase], int] = {}
    written: dict[tuple[Key, Phase], set[int]] = {}

    def lane(key: Key, phase: Phase) -> Hashable:
        if phase is Phase.FORWARD:
            return "forward", groups[key[0]], key[1]
        return delayed.get(key) if phase is Phase.BACKWARD else None

    def let_go(blocks: dict[Hashable, set[int]], key: Key) -> None:
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            if (key, phase) in kept:
                blocks[lane(key, phase)].discard(kept[key, phase])

    for each in plan.first_events():
        key = each.variant, each.slot
        where = lane(key, each.phase)
        if where is not None:
            busy = taken.setdefault(where, set())
            scratch, kept[key, each.phase] = [block for block in range(40) if block not in busy][:2]
            busy.add(kept[key, each.phase])
            written[key, each.phase] = {scratch, kept[key, each.phase]}
        if each.phase is last_phase[key]:
            let_go(taken, key)
    in_use: dict[Hashable, set[int]] = {}
    for each in plan.events * 2:
        key = each.variant, each.slot
        where = lane(key, each.phase)
        if where is not None:
            assert not written[key, each.phase] & in_use.setdefault(where, set())
            in_use[where].add(kept[key, each.phase])
        if each.phase is last_phase[key]:
            let_go(in_use, key)
