"""Optimizers are refused inside a captured step, and only there."""

from __future__ import annotations

import threading

import pytest
import torch

from graphstep.errors import CaptureError
from graphstep.strategies.baked_rates import optimizers_refused


def optimizer(lr: float | torch.Tensor = 0.1) -> torch.optim.Optimizer:
    weight = torch.ones(2, requires_grad=True)
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], lr=lr)


def test_a_rate_of_the_host_is_refused() -> None:
    with optimizers_refused(), pytest.raises(CaptureError, match="learning rate"):
        optimizer().step()
    optimizer().step()


def test_a_rate_on_the_device_is_not() -> None:
    with optimizers_refused():
        optimizer(torch.tensor(0.1)).step()


def test_other_threads_step_meanwhile() -> None:
    failures: list[BaseException] = []

    def step() -> None:
        try:
            optimizer().step()
        except CaptureError as error:
            failures.append(error)

    with optimizers_refused():
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    assert failures == []
