"""Each planted fault is found, at the right module and as the right kind; a correct model passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.verification import faulty
from tests.verification.ways import WAYS
from torch import nn

import graphstep
from graphstep.errors import VerificationError
from graphstep.verification import Part, VerifyReport


def verified(way: str, fault: Callable[[], nn.Module], device: torch.device) -> VerifyReport:
    torch.manual_seed(0)
    model = faulty.Model(fault()).to(device)
    with WAYS[way](model, device) as (target, batches, step):
        return graphstep.verify(target, batches, step)


@pytest.mark.parametrize("way", WAYS)
def test_a_correct_model_is_equal(way: str, device: torch.device) -> None:
    report = verified(way, faulty.Plain, device)
    assert (report.equal, report.first, report.num_steps, report.notes) == (True, None, 3, ())
    assert report.num_replays >= 3
    assert not report.eager_calls
    assert report.raise_if_different() is report
    assert {row.part for row in report.rows} >= {Part.FORWARD, Part.WEIGHT, Part.GRADIENT, Part.BUFFER, Part.RANDOM}
    assert "equal bit for bit" in str(report)


@pytest.mark.parametrize(
    ("fault", "inside", "part"),
    [
        (faulty.Counting, "", Part.FORWARD),
        (faulty.BakedConstant, ".scale", Part.FORWARD),
        (faulty.StaleDerived, ".derived", Part.FORWARD),
        (faulty.WrongInputGradient, "", Part.GRADIENT),
        (faulty.WrongWeightGradient, "", Part.GRADIENT),
        (faulty.DriftingBuffer, "", Part.BUFFER),
        (faulty.DriftingRandom, "", Part.RANDOM),
    ],
)
@pytest.mark.parametrize("way", WAYS)
def test_a_fault_is_found_at_its_module(
    way: str, fault: type[nn.Module], inside: str, part: Part, device: torch.device
) -> None:
    report = verified(way, fault, device)
    assert not report.equal
    assert report.first is not None
    assert report.first.part is part
    if way == "callables":  # Nothing can be laid inside of their graphs.
        assert report.first.module == f"callables[2] ({fault.__name__})"
    else:
        assert report.first.module == f"blocks.1{inside}"
    found = report.first.difference
    if part in (Part.FORWARD, Part.GRADIENT):
        assert found.max_error > 0
        assert len(found.index) >= 1
        assert found.eager != found.replayed
    if part is Part.BUFFER:
        assert (found.tensor, found.index, found.num_different) == ("seen", (1,), 1)
    with pytest.raises(VerificationError) as error:
        report.raise_if_different()
    assert report.first.module in str(error.value)
