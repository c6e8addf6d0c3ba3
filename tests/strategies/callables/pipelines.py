"""All ranks of a pipeline in one process: a small event loop hands activations and gradients from rank to rank."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.strategies.callables.jobs import HIDDEN, Block, Job
from torch import Tensor, nn

from graphstep.capture.plan import Phase
from graphstep.strategies.order_steps import OrderStep, steps_of
from graphstep.strategies.pipeline_order import pipeline_order


class Small(nn.Module):
    """As few operations as there can be with dropout and a buffer that changes."""

    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("last", torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.last.copy_(x[0])
        return x + nn.functional.dropout(self.linear(x), 0.1)


class Rank:
    """Chunks of layers, and callables that stand for them, one for each chunk, microbatch and layer."""

    def __init__(
        self,
        job: Job,
        order: Sequence[float],
        chunks: Sequence[Sequence[nn.Module]],
        *,
        reuses: bool = True,
        **more: Any,
    ) -> None:
        self.chunks, self.steps = chunks, steps_of(order, num_chunks=len(chunks))
        self.num_microbatches = sum(step.phase is Phase.FORWARD and step.chunk == 0 for step in self.steps)
        layers = tuple(layer for chunk in chunks for layer in chunk)
        self.calls: list[Callable[..., Tensor]] = job.graphed(
            layers,
            ((job.sample(requires_grad=True),),) * (self.num_microbatches * len(layers)),
            _order=order,
            _num_layers_per_chunk=[len(chunk) for chunk in chunks],
            _reuse_graph_input_output_buffers=reuses,
            **more,
        )
        self.handle = job.handles[-1] if job.graphs else None
        self.open: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """By chunk and microbatch: input and result of a forward whose backward is to come."""

    def layers_of(self, chunk: int, microbatch: int) -> Sequence[Callable[..., Tensor]]:
        num = len(self.chunks[chunk])
        first = self.num_microbatches * sum(map(len, self.chunks[:chunk])) + microbatch * num
        return self.calls[first : first + num]

    def forward(self, chunk: int, microbatch: int, x: Tensor) -> Tensor:
        given = x
        for layer in self.layers_of(chunk, microbatch):
            x = layer(x)
        self.open[chunk, microbatch] = (given, x)
        return x

    def backward(self, chunk: int, microbatch: int, gradient: Tensor | None, loss: Tensor | None) -> Tensor:
        given, result = self.open.pop((chunk, microbatch))
        if loss is not None:
            del result
            loss.backward()
        else:
            torch.autograd.backward(result, gradient)
        assert given.grad is not None
        return given.grad

    def weight_gradients(self, chunk: int, microbatch: int) -> None:
        """Of all layers, last first; eager code has computed them in the backward."""
        if self.handle is not None:
            for layer in reversed(self.layers_of(chunk, microbatch)):
                layer.backward_dw()  # type: ignore[attr-defined]


class Pipeline:
    """``copies``: what goes from rank to rank is copied, as communication does; otherwise it is handed over."""

    def __init__(
        self,
        job: Job,
        num_stages: int,
        num_microbatches: int,
        num_chunks: int = 1,
        *,
        layers: Callable[[int, int], int] = lambda _rank, _chunk: 1,
        copies: bool = True,
        orders: Sequence[Sequence[float]] | None = None,
        build: Callable[[], nn.Module] = Block,
        **options: Any,
    ) -> None:
        self.job, self.copies, self.num_microbatches = job, copies, num_microbatches
        self.num_chunks = num_chunks
        chunks = [
            [[job.built(build) for _ in range(layers(rank, chunk))] for chunk in range(num_chunks)]
            for rank in range(num_stages)
        ]
        orders = orders or [order_of_rank(num_stages, rank, num_microbatches, num_chunks) for rank in range(num_stages)]
        self.ranks = []
        for order, each in zip(orders, chunks, strict=True):
            gc.freeze()  # The tape collects garbage at each capture: not through all ranks that are there already.
            self.ranks.append(Rank(job, order, each, **options))

    def step(self) -> list[Tensor]:
        """Forwards and backwards of all ranks; returns what the loss of each microbatch was."""
        job, num_stages = self.job, len(self.ranks)
        last = num_stages * self.num_chunks - 1
        activations = {(0, m): job.draw() for m in range(self.num_microbatches)}
        targets = [job.draw() for _ in range(self.num_microbatches)]
        gradients: dict[tuple[int, int], Tensor] = {}
        losses: dict[int, Tensor] = {}
        values: list[Tensor] = [torch.empty(0)] * self.num_microbatches

        def can_run(rank: int, step: OrderStep) -> bool:
            stage = step.chunk * num_stages + rank
            if step.phase is Phase.FORWARD:
                return (stage, step.microbatch) in activations
            return step.phase is Phase.WEIGHT_GRADIENT or stage == last or (stage, step.microbatch) in gradients

        def run(rank: int, step: OrderStep) -> None:
            stage, m = step.chunk * num_stages + rank, step.microbatch
            if step.phase is Phase.FORWARD:
                x = activations.pop((stage, m)).detach().requires_grad_()
                result = self.ranks[rank].forward(step.chunk, m, x)
                if stage == last:
                    losses[m] = (result - targets[m]).float().square().mean()
                    values[m] = losses[m].detach().clone()
                else:
                    activations[stage + 1, m] = self._sent(result)
                return
            if step.phase is Phase.WEIGHT_GRADIENT:
                self.ranks[rank].weight_gradients(step.chunk, m)
                return
            gradient = self.ranks[rank].backward(
                step.chunk, m, gradients.pop((stage, m), None), losses.pop(m, None) if stage == last else None
            )
            gradients[stage - 1, m] = self._sent(gradient)

        places = [0] * num_stages
        while any(place < len(rank.steps) for place, rank in zip(places, self.ranks, strict=True)):
            before = list(places)
            for number, rank in enumerate(self.ranks):
                while places[number] < len(rank.steps) and can_run(number, rank.steps[places[number]]):
                    run(number, rank.steps[places[number]])
                    places[number] += 1
            assert places != before, "the ranks wait for each other"
        job.note(losses=values, gradients=[gradients[-1, m] for m in range(self.num_microbatches)])
        job.keep(*(gradients[-1, m] for m in range(self.num_microbatches)))
        return values

    def train(self, num_steps: int = 5, *, set_to_none: bool = True) -> None:
        optimizer = self.job.optimizer()
        for _ in range(num_steps):
            optimizer.zero_grad(set_to_none=set_to_none)
            self.step()
            optimizer.step()
        self.job.note()

    def _sent(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone() if self.copies else tensor.detach()


def order_of_rank(num_stages: int, rank: int, num_microbatches: int, num_chunks: int) -> tuple[int, ...]:
    return pipeline_order(num_microbatches, pipeline_size=num_stages, pipeline_rank=rank, num_model_chunks=num_chunks)
