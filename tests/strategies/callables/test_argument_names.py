"""Errors name the argument: by its name, wherever it was given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import graphstep
from graphstep.errors import CaptureError, InputMismatchError


def test_a_sparse_argument_is_named(device: torch.device) -> None:
    graphed = graphstep.make_graphed_callables(nn.Linear(4, 4, device=device), (torch.randn(2, 4, device=device),))
    with pytest.raises(InputMismatchError, match="argument 'input' is a sparse_coo tensor"):
        graphed(torch.eye(2, 4, device=device).to_sparse())
    graphed.forward.reset()


def test_an_argument_that_is_given_in_another_way(device: torch.device) -> None:
    graphed = graphstep.make_graphed_callables(nn.Linear(4, 4, device=device), (torch.randn(2, 4, device=device),))
    with pytest.raises(InputMismatchError) as caught:
        graphed(input=torch.randn(2, 4, device=device))
    assert caught.value.what.startswith("argument 'input' was given by position in the sample and by keyword now")
    graphed.forward.reset()


def test_an_argument_without_use_is_named(device: torch.device) -> None:
    class Ignores(nn.Linear):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x) if y is not None else x

    samples = tuple(torch.randn(2, 4, device=device, requires_grad=True) for _ in range(2))
    with pytest.raises(CaptureError, match="argument 'y' wants a gradient and gets none"):
        graphstep.make_graphed_callables(Ignores(4, 4, device=device), samples)
