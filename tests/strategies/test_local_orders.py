"""Forwards and backwards of several microbatches in flight, in every order that schedules make."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.models import Decoder, any_order, in_order
from tests.strategies.runs import Run, compared

LOCAL = "local"
WITH_DROPOUT = partial(Decoder, dropout=0.2)


def run_orders(device: torch.device, *orders: str, num_rounds: int = 2, **options: Any) -> Run:
    """Steps with each order in turn, several rounds of them."""
    assert len({order.count("f") for order in orders}) in (1, len(orders)), "which order is meant?"

    def script(run: Run) -> None:
        for _ in range(num_rounds):
            for order in orders:
                run.step(order.count("f"))

    # The second run starts with a schedule of its own: its turns begin anew.
    return compared(device, LOCAL, script, schedule=lambda: in_order(*orders), **options)


@pytest.mark.parametrize("modules", [(), ("attn",), ("mlp",)], ids=["layers", "attn", "mlp"])
@pytest.mark.parametrize("order", ["fbfbfb", "ffffbbbb", "ffffBBBB", "ffbfbfbb", "fffbBb", "fbffBb"])
def test_one_order(device: torch.device, order: str, modules: Any) -> None:
    run = run_orders(device, order, num_rounds=4, build=WITH_DROPOUT, modules=modules)
    assert run.num_replays == 2 * 3 * order.count("f")


def test_as_many_slots_as_are_in_flight(device: torch.device) -> None:
    """Eight microbatches, two in flight: two pairs a layer."""
    run = run_orders(device, "ffbfbfbfbfbfbfbb", num_rounds=3)
    assert [row.num_recordings for row in run.report.rows] == [4, 4]


def test_the_number_of_microbatches_changes(device: torch.device) -> None:
    """Any number up to what was in flight replays; beyond it calls run eagerly and are counted."""
    run = run_orders(device, "ffffbbbb", "fb", "ffbb", "fffbbb", "fffffbbbbb", build=WITH_DROPOUT)
    assert run.reasons() == {"observed": 8, "more microbatches in flight than at capture": 4}


def test_other_orders_after_a_pipelined_step(device: torch.device) -> None:
    run = run_orders(device, "fffbbb", "fbfbfb", "ffBfbB", "ffbbfb", build=WITH_DROPOUT)
    assert run.reasons() == {"observed": 6}


def test_more_in_flight_than_in_the_first_step(device: torch.device) -> None:
    """What was captured for one in flight serves one; the others run eagerly, in whatever order."""
    for order in ("ffbb", "ffBB", "fffbBb"):
        run = run_orders(device, "fb", order, num_rounds=3, build=WITH_DROPOUT)
        assert "more microbatches in flight than at capture" in run.reasons()
        assert run.num_replays > 0


@pytest.mark.parametrize("seed", range(12))
def test_any_order_after_any_other(device: torch.device, seed: int) -> None:
    """Replays never give wrong numbers, whatever was captured."""
    dice = random.Random(seed)
    for _ in range(3):
        orders = {
            order.count("f"): order for order in (any_order(dice, num_microbatches=5, in_flight=4) for _ in range(3))
        }
        build = partial(Decoder, num_layers=1, dropout=0.2)
        run_orders(device, *orders.values(), num_rounds=2, build=build)
