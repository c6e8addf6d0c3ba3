"""What is said of regions that could not be captured: once for each cause, and nothing of the step is kept alive."""

from __future__ import annotations

import gc
import warnings
from weakref import ref

import pytest
import torch
from tests.strategies.attach.plain import LAYERS, Block, Stack, attached, train
from torch import Tensor

from graphstep.errors import CaptureError
from graphstep.strategies.capture_failures import CaptureFailures, cause


def test_the_cause_is_told_without_the_name() -> None:
    assert cause("layers.0", CaptureError("a read", where="layers.0, forward; Experts")) == "a read (forward; Experts)"
    assert cause("layers.0", CaptureError("a read", where="layers.0; model.py:3")) == "a read (model.py:3)"
    assert cause("layers.0", CaptureError("a read", where="layers.0")) == "a read"
    assert cause("", CaptureError("a read", where="model.py:3")) == "a read (model.py:3)"
    assert cause("layers.0", CaptureError("a read")) == "a read"


def test_one_warning_for_each_cause() -> None:
    failures = CaptureFailures()
    for number in (0, 1, 2, 5):
        failures.add(f"layers.{number}", CaptureError("a read", where=f"layers.{number}, forward", fix="do not"))
    failures.add("head", CaptureError("a shape", where="head, forward"))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        failures.warn(stacklevel=1)
    assert [str(each.message).splitlines()[0] for each in seen] == [
        "layers.0 … layers.2, layers.5 run eagerly: a read",
        "head runs eagerly: a shape",
    ]
    assert {each.filename for each in seen} == {__file__}


def test_nothing_to_tell() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CaptureFailures().warn(stacklevel=1)


def test_errors_are_not_kept() -> None:
    failures, error = CaptureFailures(), CaptureError("a read", where="a, forward")
    failures.add("a", error)
    gone = ref(error)
    del error
    gc.collect()
    assert gone() is None


class Reads(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0 * x.sum().item())


def three_that_read() -> Stack:
    model = Stack(1)
    model.layers.extend(Reads() for _ in range(3))
    return model


def test_layers_that_fail_alike_are_told_together(device: torch.device) -> None:
    model = three_that_read().to(device)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with attached(model, LAYERS, policy="auto") as manager:
            train(model, device, 3)
            report = manager.report()
    told = [str(each.message) for each in seen if "eagerly" in str(each.message)]
    assert len(told) == 1
    assert told[0].startswith("layers.1 … layers.3 run eagerly: ")
    assert str(report).count("not captured, layers.1 … layers.3: ") == 1
    assert [row.num_replays > 0 for row in report.rows] == [True, False, False, False]


def test_where_graphs_are_required_the_policy_is_offered(device: torch.device) -> None:
    model = three_that_read().to(device)
    with attached(model, LAYERS), pytest.raises(CaptureError) as raised:
        train(model, device, 3)
    assert raised.value.fix.endswith("policy='auto' (--cuda-graph-policy auto)")
