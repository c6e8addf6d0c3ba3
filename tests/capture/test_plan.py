"""The order of a step: observed for any interleaving, guarded where memory depends on it."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from graphstep.capture.plan import Event, Origin, Phase, Plan, PlanObserver, Variant, lowest_free
from graphstep.capture.region import Region
from graphstep.capture.signature import Signature

F, B = Phase.FORWARD, Phase.BACKWARD


def region(name: str) -> Region:
    return Region(name, "layer", lambda x: x, ())


SIGNATURE = Signature.of((torch.zeros(2),), device_type="cpu")
R = [region(f"layers.{index}") for index in range(3)]


def observe(order: str, observer: PlanObserver | None = None) -> Plan:
    """``"0f 1f 1b 0b"``: forwards and backwards of regions. Backwards take the oldest open slot, or ``0b1`` slot 1."""
    observer = observer or PlanObserver()
    open_slots: dict[int, list[int]] = {}
    for word in order.split():
        index, phase, slot = int(word[0]), word[1], word[2:]
        if phase == "f":
            x = torch.zeros(2)
            _, given = observer.forward(R[index], SIGNATURE, [x])
            open_slots.setdefault(index, []).append(given)
        else:
            taken = int(slot) if slot else open_slots[index][0]
            open_slots[index].remove(taken)
            observer.backward(variant(observer.plan, R[index]), taken)
    return observer.plan


def variant(plan: Plan, of: Region) -> Variant:
    return next(event.variant for event in plan.events if event.variant.region is of)


def words(plan_events: Iterable[Event]) -> str:
    """What :func:`observe` was given, each with its slot."""
    return " ".join(f"{R.index(e.variant.region)}{'f' if e.phase is F else 'b'}{e.slot}" for e in plan_events)


def test_one_microbatch_after_another_needs_one_slot() -> None:
    plan = observe("0f 1f 1b 0b 0f 1f 1b 0b 0f 1f 1b 0b")
    assert plan.num_slots == 1
    assert plan.first_events() == events("0f", "1f", "1b", "0b")
    assert len(plan.events) == 12
    assert plan.trained() == {(R[0], 0), (R[1], 0)}


@pytest.mark.parametrize(
    ("order", "num_slots"),
    [
        ("0f 0f 0f 0f 0b 0b 0b 0b", 4),
        ("0f 0f 0b 0f 0b 0f 0b 0b", 2),
        ("0f 0f 0f 0b 0b 0b 0f 0b", 3),
        ("0f 0f 0b1 0b0", 2),
        ("0f 1f 0f 1f 1b0 0b0 1b1 0b1", 2),
        ("0f 0b 0f 0b 0f 0b", 1),
    ],
)
def test_as_many_slots_as_microbatches_in_flight(order: str, num_slots: int) -> None:
    assert observe(order).num_slots == num_slots


@pytest.mark.parametrize(
    ("order", "is_nested"),
    [
        ("0f 1f 2f 2b 1b 0b", True),
        ("0f 1f 1b 0b 0f 1f 1b 0b", True),
        ("0f 1f 1b 0b 2f 2b", True),
        ("0f 1f 2f 2b 0b", True),
        ("0f 1f 0b 1b", False),
        ("2f 0f 1f 2b 1b 0b", False),
        ("0f 0f 0b1 0b0", False),
    ],
)
def test_only_one_microbatch_after_another_is_nested(order: str, is_nested: bool) -> None:
    assert observe(order).is_nested is is_nested


def test_a_free_slot_is_used_again() -> None:
    assert observe("0f 0f 0b0 0f 0b1 0b0").events == events("0f0", "0f1", "0b0", "0f0", "0b1", "0b0")


def test_origins_tell_which_output_an_argument_is() -> None:
    observer = PlanObserver()
    x, y = torch.zeros(2), torch.ones(2)
    signature = Signature.of((x,), device_type="cpu")
    slot = observer.forward(R[0], signature, [x])
    observer.outputs(R[0], slot, [x, y])
    observer.forward(R[1], signature, [y, torch.ones(2), x])
    call = observer.plan.calls[R[1], 0]
    assert call.origins == (Origin(R[0], 0, 1), None, Origin(R[0], 0, 0))
    assert call.addresses[0] == y.data_ptr()


def test_an_output_that_is_gone_is_no_origin() -> None:
    observer = PlanObserver()
    signature = Signature.of((torch.zeros(2),), device_type="cpu")

    def call(of: Region, tensor: Tensor) -> None:
        slot = observer.forward(of, signature, [tensor])
        observer.outputs(of, slot, [torch.zeros(2)])

    for _ in range(20):  # identities of dead tensors come back
        call(R[0], torch.zeros(2))
    assert all(call.origins == (None,) for call in observer.plan.calls.values())


def test_a_region_whose_backward_never_came_is_not_trained() -> None:
    assert observe("0f 1f 1b").trained() == {(R[1], 0)}


def test_a_dropped_forward_is_no_part_of_the_plan() -> None:
    observer = PlanObserver()
    observe("0f", observer)
    observer.dropped(R[0], 0)
    observer.dropped(R[0], 0)
    plan = observe("1f 0f 0b", observer)
    assert plan.events == events("1f", "0f", "0b")
    assert plan.num_slots == 1
    observer.dropped(R[1], 0)
    assert (R[1], 0) not in plan.calls
    assert plan.trained() == {(R[0], 0)}


def test_regions_that_ran_twice_before_one_backward_pass_are_noted() -> None:
    observer = PlanObserver()
    plan = observe("0f 0f 1f 1f", observer)
    for region, slot, backward_pass in ((R[0], 1, 7), (R[0], 0, 7), (R[1], 1, 7), (R[1], 0, 8)):
        observer.backward(region, slot, backward_pass)
    assert plan.reused == {R[0]}


def test_a_backward_is_noted_once() -> None:
    observer = PlanObserver()
    plan = observe("0f 0b", observer)
    observer.backward(R[0], 0)
    assert plan.events == events("0f", "0b")


def test_lowest_free() -> None:
    assert [lowest_free(busy) for busy in (set(), {0}, {1}, {0, 1, 3})] == [0, 1, 0, 2]
