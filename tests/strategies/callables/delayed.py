"""Orders with weight gradients of their own, and steps that run in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.strategies.callables.jobs import HIDDEN, Job
from torch import Tensor, nn

Calls = list[Any]


def delayed(order: Sequence[float], by: int) -> list[float]:
    """Weight gradients come ``by`` backwards after their own, and what is left at the end."""
    found: list[float] = []
    waiting: list[float] = []
    for entry in order:
        found.append(entry)
        if entry < 0:
            waiting.append(entry - 0.5)
            if len(waiting) > by:
                found.append(waiting.pop(0))
    return found + waiting


def calls_of(job: Job, module: nn.Module, order: Sequence[float], *sample: Any, **options: Any) -> Calls:
    num_microbatches = sum(entry == 1 for entry in order)
    samples = (sample or (job.sample(requires_grad=True),),) * num_microbatches
    made: Calls = job.graphed((module,), samples, _order=list(order), **options)
    return made


def weight_gradients(job: Job, call: Any) -> None:
    if job.graphs:
        call.backward_dw()


def stepped(job: Job, calls: Calls, order: Sequence[float], feed: Callable[[], tuple[Any, ...]] | None = None) -> None:
    """One step; what it leaves is noted."""
    counts = {1.0: 0, -1.0: 0, -1.5: 0}
    losses: list[Tensor] = []
    inputs: list[tuple[Any, ...]] = []
    for entry in order:
        number = counts[float(entry)]
        counts[float(entry)] += 1
        if entry == 1:
            inputs.append(feed() if feed is not None else (job.draw(requires_grad=True),))
            result = calls[number](*inputs[-1])
            results = result if isinstance(result, tuple) else (result,)
            losses.append(torch.stack([r.float().square().sum() for r in results if r.requires_grad]).sum())
            del result, results
        elif entry == -1:
            losses[number].backward()
            losses[number] = losses[number].detach()
        else:
            weight_gradients(job, calls[number])
    job.note(losses=losses, inputs=inputs)


class Several(nn.Module):
    """Results of which one depends on a weight alone, and a weight that is used twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(HIDDEN, HIDDEN), nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = torch.tanh(self.linear(x))
        return self.linear(hidden) + y, self.scale.exp(), (hidden * self.scale).detach()


class Own(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] * weight, (gradients[0] * x).sum(0)


class InPython(nn.Module):
    """A function of one's own between two layers, and a hook on what is between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden.register_hook(lambda gradient: gradient * 2)
        result: Tensor = self.second(Own.apply(hidden, self.weight))  # type: ignore[no-untyped-call]
        return result
