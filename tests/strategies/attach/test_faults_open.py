"""Faults that were found by writing these tests."""

from __future__ import annotations

import random
from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.attached import Loop, twins
from tests.strategies.models import Decoder, in_order

from graphstep.capture.plan import Variant
from graphstep.strategies.captured_chains import CapturedChains

ORDERS = ("fffbbb", "ffBB", "ffBB", "fbffBb", "fb", "fbffBb", "fb")
LENGTHS = ((6, 4, 9), (9, 6), (4, 4), (9, 6, 9), (6,), (6, 9, 6), (6,))


class InTurn:
    """Schedules one after another."""

    def __init__(self) -> None:
        self.orders = iter(ORDERS)

    def __call__(self, **arguments: Any) -> Any:
        return in_order(next(self.orders))(**arguments)


@pytest.mark.parametrize("number", range(8))
def test_regions_that_were_evicted_one_by_one(
    device: torch.device, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs of some layers, others run eagerly, their chains cut in all places; which of them is a matter of order."""
    dice, worth_it = random.Random(number), CapturedChains.worth_it

    def in_any_order(chains: CapturedChains, seen: Iterable[Variant], *others: Any) -> Any:
        return worth_it(chains, dice.sample(list(seen), k=len(list(seen))), *others)

    def script(loop: Loop) -> None:
        for lengths in LENGTHS:
            loop.step(batches=[loop.batch(length=length) for length in lengths])

    monkeypatch.setattr(CapturedChains, "worth_it", in_any_order)
    config = {"max_signatures": 2, "capture_after": 1}
    twins(device, script, build=partial(Decoder, 3, 0.1), config=config, schedule=InTurn)
