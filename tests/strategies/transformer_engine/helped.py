"""Training loops with a `TECudaGraphHelper`, each with an eager twin that must leave the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tests.strategies.attach.attached import Loop
from tests.strategies.models import in_order, run_microbatches
from tests.strategies.runs import insist_on_the_same_bits
from torch import Tensor, nn
from torch.nn import functional

from graphstep.capture.plan import Phase
from graphstep.capture.report import CaptureReport
from graphstep.config import CudaGraphConfig
from graphstep.strategies import TECudaGraphHelper
from graphstep.strategies.order_steps import steps_of
from graphstep.strategies.pipeline_order import pipeline_order


@dataclass(frozen=True)
class Schedule:
    """An order for the helper, and a function that runs a step in it."""

    order: tuple[int, ...]
    make: Callable[[], Callable[..., Tensor]]
    num_microbatches: int
    num_chunks: int = 1


def halves(model: Any) -> list[Sequence[nn.Module]]:
    """The layers of two chunks."""
    return [model.layers[:1], model.layers[1:]]


def interleaved(order: tuple[int, ...]) -> Callable[..., Tensor]:
    """Runs a model in two chunks; what goes from one to the other is detached, as if it came from another rank."""
    steps = steps_of(order, num_chunks=2)

    def forward_backward(
        *, data_iterator: Iterator[Any], model: Any, num_microbatches: int, forward_only: bool = False
    ) -> Tensor:
        if forward_only:
            return run_microbatches(
                data_iterator=data_iterator, model=model, num_microbatches=num_microbatches, forward_only=True
            )
        batches = [next(data_iterator) for _ in range(num_microbatches)]
        middle: dict[int, tuple[Tensor, Tensor]] = {}
        losses: dict[int, Tensor] = {}
        values: dict[int, Tensor] = {}
        for step in steps:
            number, batch = step.microbatch, batches[step.microbatch]
            if step.phase is Phase.FORWARD and step.chunk == 0:
                x = model.embedding(batch["tokens"])
                for layer in halves(model)[0]:
                    x = layer(x)
                middle[number] = x, x.detach().requires_grad_()
            elif step.phase is Phase.FORWARD:
                x = middle[number][1]
                for layer in halves(model)[1]:
                    x = layer(x)
                logits = functional.linear(model.norm(x), model.embedding.weight)
                losses[number] = functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())
                values[number] = losses[number].detach().float()
            elif step.chunk == 1:
                (losses.pop(number) / num_microbatches).backward()
            else:
                sent, received = middle.pop(number)
                sent.backward(received.grad)
            x = None
        return torch.stack([values[number] for number in range(num_microbatches)])

    return forward_backward


_INTERLEAVED = pipeline_order(4, pipeline_size=2, pipeline_rank=0, num_model_chunks=2)
SCHEDULES = {
    "no pipelining": Schedule((1, -1), lambda: in_order("fbfbfb"), 3),
    "1F1B": Schedule(pipeline_order(4, pipeline_size=3, pipeline_rank=0), lambda: in_order("fffbfbbb"), 4),
    "interleaved": Schedule(_INTERLEAVED, lambda: interleaved(_INTERLEAVED), 4, num_chunks=2),
}


class Helped:
    """A helper that captures before the second step."""

    def __init__(self, loop: HelpedLoop) -> None:
        chunks = [nn.ModuleList(half) for half in halves(loop.model)] if loop.schedule.num_chunks == 2 else loop.model
        config = CudaGraphConfig(impl="transformer_engine", **loop.config)
        self.helper = TECudaGraphHelper(chunks, config, 6, 2, order=loop.schedule.order)

    def report(self) -> CaptureReport:
        return self.helper.report()

    def close(self) -> None:
        self.helper.delete_cuda_graphs()


class HelpedLoop(Loop):
    """``graphs`` makes a helper for its model."""

    def __init__(self, device: torch.device, graphs: bool, schedule: Schedule, **options: Any) -> None:
        self.schedule = schedule
        super().__init__(device, graphs, forward_backward=schedule.make(), **options)

    def _attach(self) -> Any:
        return Helped(self) if self.graphs else None

    def step(self, num_microbatches: int = 0, **options: Any) -> Tensor:
        if self.manager is not None and self.manager.helper.is_recorded:
            self.manager.helper.create_cudagraphs()
        return super().step(num_microbatches or self.schedule.num_microbatches, **options)


def twins(device: torch.device, script: Callable[[HelpedLoop], Any], schedule: Schedule, **options: Any) -> HelpedLoop:
    """Run ``script`` eagerly and with a helper, and insist on the same bits. Returns the closed loop of the helper."""
    loops = []
    for graphs in (False, True):
        loop = HelpedLoop(device, graphs, schedule, **options)
        script(loop)
        loops.append(loop)
    insist_on_the_same_bits(*loops)
    loops[1].close()
    return loops[1]
