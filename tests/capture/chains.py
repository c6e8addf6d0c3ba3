"""Blocks in two copies, one of them captured as a chain, and a script that is run on both."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.capture.pairs import Caller, callers_of, linked
from tests.waiting import wait_for
from torch import Tensor, nn
from torch.nn import functional

from graphstep.capture.session import GraphSession

Layers = Sequence[Callable[..., Any]]


class Block(nn.Module):
    """Saves its result, draws numbers, counts, and reads a context that is the same for all."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, gate: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        y = functional.dropout(torch.tanh(self.inner(x)), 0.25)
        return torch.sigmoid(x + (y if gate is None else y * gate) * scale)


class Straight(nn.Module):
    """Uses its input once: a further use of it outside is added to one gradient, in whatever order."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.inner(x))


class Model:
    """Blocks in two copies: one runs eagerly, the other is captured as a chain."""

    def __init__(
        self, session: GraphSession, num_blocks: int = 2, block: Callable[[], nn.Module] = Block, **options: Any
    ) -> None:
        self.device = session.device
        self.eager = nn.ModuleList(block() for _ in range(num_blocks)).to(self.device)
        self.graphed = copy.deepcopy(self.eager)
        examples = options.pop("examples", ())
        modules = [list(block.modules()) for block in self.graphed]
        x = self.inputs(1)[0]
        self.chain = linked(session, list(self.graphed), x, *examples, modules=modules, **options)

    @property
    def callers(self) -> list[Caller]:
        return callers_of(self.chain)

    def inputs(self, seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randn(3, 4, generator=generator).to(self.device).requires_grad_() for _ in range(2)]

    def compare(self, script: Callable[[Layers, Sequence[Tensor]], Any], seeds: Sequence[int] = (1, 2, 3)) -> None:
        """Run a script on both for changing inputs; it may return what has to be equal besides gradients and state."""
        for seed in seeds:
            found = []
            for layers, blocks in ((list(self.eager), self.eager), (self.callers, self.graphed)):
                torch.manual_seed(seed)
                xs = self.inputs(seed)
                result = script(layers, xs)
                gradients = [x.grad for x in xs]
                state = [*blocks.buffers(), torch.rand(2), torch.rand(2, device=self.device)]
                found.append([*(result or []), *gradients, *(p.grad for p in blocks.parameters()), *state])
            assert len(found[0]) == len(found[1])
            for index, (eager, graphed) in enumerate(zip(*found, strict=True)):
                assert _same(eager, graphed), f"seed {seed}, {index}"

    def check_idle(self) -> None:
        def is_idle() -> bool:
            return all(pair.num_in_flight == 0 for pair in self.chain.pairs)

        def is_idle_without_garbage() -> bool:
            gc.collect()
            return is_idle()

        # The thread of a backward pass that failed lets go of it a little later.
        assert is_idle() or wait_for(is_idle_without_garbage, seconds=2.0)
        assert self.chain.lane.latest is None
        assert all(caller.pending is None for caller in self.callers)
        assert sum(c.num_closed for c in self.callers) == sum(c.num_started for c in self.callers)


def _same(eager: Any, graphed: Any) -> bool:
    if eager is None or graphed is None:
        # A gradient that nobody asked for is none, or a home without anything in it.
        other = graphed if eager is None else eager
        return other is None or not other.any()
    return torch.equal(eager, graphed)


def counts(model: Model) -> list[tuple[int, int, int]]:
    return [(caller.num_started, caller.num_expected, caller.num_eager) for caller in model.callers]


def straight(layers: Layers, xs: Sequence[Tensor]) -> list[Tensor]:
    hidden = xs[0]
    for layer in layers:
        hidden = layer(hidden)
    hidden.square().sum().backward()
    return [hidden.detach().clone()]
