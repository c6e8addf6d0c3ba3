"""The same model and batches under each way of capturing a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from tests.verification.faulty import REGIONS, WIDTH, Model, batches
from torch import Tensor, nn

import graphstep
from graphstep.config import CudaGraphConfig

Verified = tuple[Any, list[Any], Callable[[Any], Any] | None]
"""Target, batches and step, as ``verify`` takes them."""


@contextmanager
def attached(model: Model, device: torch.device) -> Iterator[Verified]:
    with graphstep.attach(model, regions=REGIONS) as manager:
        yield manager, batches(device), None


@contextmanager
def whole_step(model: Model, device: torch.device) -> Iterator[Verified]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-8, fused=True)

    @graphstep.graph_step
    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    yield step, batches(device), None
    step.close()


def forward_backward(
    *, data_iterator: Iterator[Any], model: nn.Module, num_microbatches: int, forward_only: bool = False
) -> Tensor:
    losses = []
    for _ in range(num_microbatches):
        loss = model(next(data_iterator)).square().mean()
        loss.backward()
        losses.append(loss.detach().float())
    return torch.stack(losses)


@contextmanager
def iteration(model: Model, device: torch.device) -> Iterator[Verified]:
    session = graphstep.GraphSession(device)
    wrapper = graphstep.FullCudaGraphWrapper(forward_backward, model=model, session=session)
    each = batches(device, 6)
    yield wrapper, [each[:2], each[2:4], each[4:]], None
    wrapper.close()


@contextmanager
def local(model: Model, device: torch.device) -> Iterator[Verified]:
    session = graphstep.GraphSession(device)
    config = CudaGraphConfig(impl="local", warmup_steps=1)
    strategy = graphstep.LocalGraphs(forward_backward, model=model, session=session, config=config)
    each = batches(device, 6)
    yield strategy, [each[:2], each[2:4], each[4:]], None
    strategy.close()


@contextmanager
def callables(model: Model, device: torch.device) -> Iterator[Verified]:
    sample = torch.randn(4, WIDTH, device=device, requires_grad=True)
    modules = (model.first, *model.blocks, model.head)
    graphed = graphstep.make_graphed_callables(modules, tuple((sample,) for _ in modules))

    def step(batch: Tensor) -> Tensor:
        x = batch
        for each in graphed:
            x = each(x.requires_grad_() if x.is_leaf else x)
        x.square().mean().backward()
        return x

    yield graphed, batches(device), step
    modules[0].forward.reset()


WAYS: Mapping[str, Any] = MappingProxyType(
    {"attach": attached, "graph_step": whole_step, "full_iteration": iteration, "callables": callables}
)
