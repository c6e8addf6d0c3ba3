"""Policies of whole steps and optimizer graphs may be words, and what there is not is refused at once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import graphstep
from graphstep.errors import CaptureError, ConfigError

CPU = torch.device("cpu")


def reading(*, data_iterator: Iterator[Tensor], model: nn.Module, num_microbatches: int, forward_only: bool) -> Tensor:
    """Cannot be captured."""
    loss: Tensor = model(next(data_iterator)).square().mean()
    return loss.detach() * float(loss.detach())


def wrapper(**options: Any) -> Callable[[], Any]:
    session = graphstep.GraphSession(CPU)
    made = graphstep.FullCudaGraphWrapper(reading, model=nn.Linear(4, 4), session=session, **options)
    return lambda: made(data_iterator=iter([torch.ones(2, 4)]), num_microbatches=1, forward_only=True)


def optimizer_graph(**options: Any) -> Callable[[], Any]:
    return graphstep.OptimizerGraph(torch.optim.AdamW([torch.ones(2, requires_grad=True)]), **options).step


@pytest.mark.parametrize("make", [wrapper, optimizer_graph])
def test_policies_are_words(make: Callable[..., Callable[[], Any]]) -> None:
    call = make(policy="required")
    for _ in range(3):
        call()
    with pytest.raises(CaptureError):
        call()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Nothing is tried.
        call = make(policy="off")
        for _ in range(5):
            call()


@pytest.mark.parametrize("make", [wrapper, optimizer_graph])
def test_what_there_is_not_is_refused_at_once(make: Callable[..., Callable[[], Any]]) -> None:
    with pytest.raises(ConfigError) as caught:
        make(policy="sometimes", cuda_graph_warmup_steps=-1)
    assert len(caught.value.problems) == 2


def test_other_options_of_the_wrapper() -> None:
    with pytest.raises(ConfigError) as caught:
        wrapper(on_mismatch="replay", max_graphs=0)
    assert len(caught.value.problems) == 2
