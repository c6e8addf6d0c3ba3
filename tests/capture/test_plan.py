"""The order of a step: observed for any interleaving, with one slot for each microbatch in flight."""

from __future__ import annotations

import pytest
import torch
from tests.capture.plans import LONGER, SIGNATURE, R, observe, variant, words
from torch import Tensor

from graphstep.capture.plan import Event, Key, Origin, Phase, Plan, PlanObserver, Variant, lowest_free
from graphstep.capture.region import Region
from graphstep.capture.signature import Signature


def keys(found: set[Key]) -> set[tuple[Region, int]]:
    return {(variant.region, slot) for variant, slot in found}


def num_slots_of(plan: Plan) -> int:
    return len({event.slot for event in plan.events})


def test_one_microbatch_after_another_needs_one_slot() -> None:
    plan = observe("0f 1f 1b 0b 0f 1f 1b 0b 0f 1f 1b 0b")
    assert num_slots_of(plan) == 1
    assert words(plan.first_events()) == "0f0 1f0 1b0 0b0"
    assert len(plan.events) == 12
    assert keys(plan.trained()) == {(R[0], 0), (R[1], 0)}


@pytest.mark.parametrize(
    ("order", "num_slots"),
    [
        ("", 0),
        ("0f 0f 0f 0f 0b 0b 0b 0b", 4),
        ("0f 0f 0b 0f 0b 0f 0b 0b", 2),
        ("0f 0f 0f 0b 0b 0b 0f 0b", 3),
        ("0f 0f 0b1 0b0", 2),
        ("0f 1f 0f 1f 1b0 0b0 1b1 0b1", 2),
        ("0f 0b 0f 0b 0f 0b", 1),
        ("0f 0F 0B 0b", 1),
        ("0f 0F 0F 0b 0B 0B", 2),
    ],
)
def test_as_many_slots_as_microbatches_in_flight(order: str, num_slots: int) -> None:
    assert num_slots_of(observe(order)) == num_slots


def test_a_free_slot_is_used_again() -> None:
    assert words(observe("0f 0f 0b0 0f 0b1 0b0").events) == "0f0 0f1 0b0 0f0 0b1 0b0"


def test_the_first_events_are_those_of_each_shape_and_slot() -> None:
    plan = observe("0f 0b 0F 0B 0f 0f 0b 0b 0F 0B")
    assert words(plan.first_events()) == "0f0 0b0 0F0 0B0 0f1 0b1"


def test_a_region_and_signature_are_one_variant() -> None:
    plan = observe("0f 0b 0F 0B 1f 1b 0f 0b")
    variants = {event.variant for event in plan.events}
    assert len(variants) == 3
    assert {variant(plan, 0), variant(plan, 0, LONGER), variant(plan, 1)} == variants
    assert [event.variant for event in plan.events[:2]] == [event.variant for event in plan.events[6:]]


def test_slots_that_are_taken_are_not_observed_again() -> None:
    observer = PlanObserver()
    slots = [observer.forward(R[0], SIGNATURE, [], taken=(0, 2))[1] for _ in range(3)]
    assert slots == [1, 3, 4]


def test_a_call_is_in_the_slot_of_its_argument_if_that_is_free() -> None:
    observer = PlanObserver()
    x = torch.zeros(2)

    def forward(index: int, tensor: Tensor, taken: tuple[int, ...] = ()) -> int:
        return observer.forward(R[index], SIGNATURE, [tensor], taken=taken)[1]

    forward(0, x)
    key = observer.forward(R[0], SIGNATURE, [x])
    observer.outputs(*key, [x])
    assert key[1] == 1
    assert forward(1, x) == 1
    assert forward(1, x) == 0
    assert forward(2, x, taken=(1,)) == 0


def test_origins_tell_which_output_an_argument_is() -> None:
    observer = PlanObserver()
    x, y = torch.zeros(2), torch.ones(2)
    first = observer.forward(R[0], SIGNATURE, [x])
    observer.outputs(*first, [x, y])
    second = observer.forward(R[1], SIGNATURE, [y, torch.ones(2), x])
    call = observer.plan.calls[second]
    assert call.origins == (Origin(*first, 1), None, Origin(*first, 0))
    assert call.addresses[0] == y.data_ptr()


def test_an_output_that_is_gone_is_no_origin() -> None:
    observer = PlanObserver()

    def call(of: Region, tensor: Tensor) -> None:
        key = observer.forward(of, SIGNATURE, [tensor])
        observer.outputs(*key, [torch.zeros(2)])

    for _ in range(20):  # identities of dead tensors come back
        call(R[0], torch.zeros(2))
    assert len(observer.plan.calls) == 20
    assert all(call.origins == (None,) for call in observer.plan.calls.values())


def test_a_region_whose_backward_never_came_is_not_trained() -> None:
    assert keys(observe("0f 1f 1b").trained()) == {(R[1], 0)}


def test_a_dropped_forward_is_no_part_of_the_plan() -> None:
    observer = PlanObserver()
    observe("0f", observer)
    first = variant(observer.plan, 0)
    observer.dropped(first, 0)
    observer.dropped(first, 0)
    plan = observe("1f 0f 0b", observer)
    assert words(plan.events) == "1f0 0f0 0b0"
    assert num_slots_of(plan) == 1
    second = variant(plan, 1)
    observer.dropped(second, 0)
    assert (second, 0) not in plan.calls
    assert plan.trained() == {(first, 0)}
    assert observer.num_in_flight == 0


def test_a_dropped_repetition_leaves_the_call_in_the_plan() -> None:
    observer = PlanObserver()
    plan = observe("0f 0b 0f", observer)
    observer.dropped(variant(plan, 0), 0)
    assert words(plan.events) == "0f0 0b0"
    assert keys(set(plan.calls)) == {(R[0], 0)}


def test_what_is_in_flight_is_counted() -> None:
    observer = PlanObserver()
    counts = []
    for word in ("0f", "1f", "0F", "1f"):
        observe(word, observer)
        counts.append(observer.num_in_flight)
    observer.backward(variant(observer.plan, 1), 1)
    counts.append(observer.num_in_flight)
    observer.dropped(variant(observer.plan, 0, LONGER), 0)
    assert [*counts, observer.num_in_flight] == [1, 2, 3, 4, 3, 2]


def test_regions_that_ran_twice_before_one_backward_pass_are_noted() -> None:
    observer = PlanObserver()
    plan = observe("0f 0f 1f 1f 2f 2F", observer)
    for index, slot, backward_pass in ((0, 1, 7), (0, 0, 7), (1, 1, 7), (1, 0, 8)):
        observer.backward(variant(plan, index), slot, backward_pass)
    assert plan.reused == {R[0]}
    for signature in (SIGNATURE, LONGER):
        observer.backward(variant(plan, 2, signature), 0, 9)
    assert plan.reused == {R[0], R[2]}


def test_a_backward_is_noted_once() -> None:
    observer = PlanObserver()
    plan = observe("0f 0b", observer)
    observer.backward(variant(plan, 0), 0)
    observer.backward(Variant(R[1], SIGNATURE), 0)
    assert words(plan.events) == "0f0 0b0"


def test_the_part_about_some_variants_that_were_trained() -> None:
    plan = observe("0f 1f 0F 0B 1b 0b 2f 0f 0f 0b")
    wanted = {variant(plan, 0), variant(plan, 2)}
    part = plan.only(wanted)
    assert words(part.events) == "0f0 0b0 0f0 0b0"  # slot 1 and region 2 have no backward
    assert keys(set(part.calls)) == {(R[0], 0)}
    assert all(part.calls[key] is plan.calls[key] for key in part.calls)
    assert plan.only([]).calls == {}


def test_an_event_names_phase_region_and_slot() -> None:
    assert str(Event(Variant(R[1], SIGNATURE), 2, Phase.BACKWARD)) == "backward of layers.1 (slot 2)"


def test_signatures_of_equal_calls_are_equal() -> None:
    assert Signature.of((torch.ones(2),), device_type="cpu") == SIGNATURE != LONGER


def test_lowest_free() -> None:
    assert [lowest_free(busy) for busy in (set(), {0}, {1}, {0, 1, 3})] == [0, 1, 0, 2]
