"""Faults that were found by writing these tests."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from tests.strategies.attach.attached import Loop, twins
from tests.strategies.models import Decoder, in_order

ORDERS = ("fffbbb", "ffBB", "ffBB", "fbffBb", "fb", "fbffBb", "fb")
LENGTHS = ((6, 4, 9), (9, 6), (4, 4), (9, 6, 9), (6,), (6, 9, 6), (6,))


class InTurn:
    """Schedules one after another."""

    def __init__(self) -> None:
        self.orders = iter(ORDERS)

    def __call__(self, **arguments: Any) -> Any:
        return in_order(next(self.orders))(**arguments)


@pytest.mark.parametrize("attempt", range(25))
def test_regions_that_were_evicted_one_by_one(device: torch.device, attempt: int) -> None:
    """Fails in one of ten attempts: the backward of a layer gets no gradient from the layer after it."""

    def script(loop: Loop) -> None:
        for lengths in LENGTHS:
            loop.step(batches=[loop.batch(length=length) for length in lengths])

    config = {"max_signatures": 2, "capture_after": 1}
    twins(device, script, build=partial(Decoder, 3, 0.1), config=config, schedule=InTurn)
