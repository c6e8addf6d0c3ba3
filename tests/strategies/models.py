"""A small decoder with everything that graphs can get wrong: dropout, state, tied weights, several outputs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from graphstep.models.segments import Segment, SegmentedModule

VOCABULARY, HIDDEN = 13, 16


class Mix(nn.Module):
    """Mixes positions, counts its calls and keeps a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.query = nn.Linear(HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.training:
            self.calls.add_(1)
            self.mean.mul_(0.9).add_(x.detach().float().mean((0, 1)), alpha=0.1)
        weights = torch.softmax(self.query(x) @ x.transpose(1, 2), -1)
        return self.out(weights @ x)


class Layer(SegmentedModule):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.mix = Mix()
        self.mlp = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 24), nn.GELU(), nn.Linear(24, HIDDEN))

    def segments(self) -> tuple[Segment, ...]:
        return (Segment("attn", "mix", self._mix, (self.mix,)), Segment("mlp", "mlp", self._mlp, (self.mlp,)))

    def _mix(self, x: Tensor, *_context: Tensor) -> Tensor:
        return x + functional.dropout(self.mix(x), self.dropout, self.training)

    def _mlp(self, x: Tensor, *context: Tensor) -> Tensor:
        y = functional.dropout(self.mlp(x), self.dropout, self.training)
        return x + (y * context[0] if context else y)


class Wrapped(nn.Module):
    """A plain module around a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.inner = layer

    def forward(self, x: Tensor, *context: Tensor) -> Tensor:
        return self.inner(x * 1.5, *context)


class Decoder(nn.Module):
    """Tied embedding and head around layers; ``forward`` returns the mean loss."""

    def __init__(
        self,
        num_layers: int = 2,
        dropout: float = 0.0,
        *,
        layer: Callable[[float], nn.Module] = Layer,
        order: tuple[int, ...] = (),
        context: str = "",
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(layer(dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(HIDDEN)
        self.order = order or tuple(range(num_layers))
        self.context = context
        self.register_buffer("scale", torch.rand(HIDDEN) + 0.5)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for index in self.order:
            x = self.layers[index](x, *self._context(x))
        logits = functional.linear(self.norm(x), self.embedding.weight)
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())

    def _context(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.context == "buffer":
            return (self.scale,)
        if self.context == "expanded":
            return (self.scale.expand(x.shape[0], x.shape[1], HIDDEN),)
        if self.context == "fresh":
            return (x.detach().abs().mean((0, 1)),)
        return ()


def run_microbatches(
    *, data_iterator: Iterator[Any], model: nn.Module, num_microbatches: int, forward_only: bool = False
) -> Tensor:
    """One microbatch after another."""
    losses = []
    for _ in range(num_microbatches):
        batch = next(data_iterator)
        with torch.no_grad() if forward_only else nullcontext():
            loss = model(batch["tokens"], batch["labels"])
        if not forward_only:
            (loss / num_microbatches).backward()
        losses.append(loss.detach().float())
    return torch.stack(losses)


def in_order(*orders: str) -> Callable[..., Tensor]:
    """Schedules: ``"ffbfbb"`` runs forwards, and backwards of the oldest forward in flight (``B``: the newest).

    Those that fit the number of microbatches take turns.
    """
    num_calls: Counter[int] = Counter()

    def forward_backward(
        *, data_iterator: Iterator[Any], model: nn.Module, num_microbatches: int, forward_only: bool = False
    ) -> Tensor:
        if forward_only:
            return run_microbatches(
                data_iterator=data_iterator, model=model, num_microbatches=num_microbatches, forward_only=True
            )
        fitting = [order for order in orders if order.count("f") == num_microbatches]
        order = fitting[num_calls[num_microbatches] % len(fitting)]
        num_calls[num_microbatches] += 1
        losses, waiting = [], []
        for word in order:
            if word == "f":
                batch = next(data_iterator)
                waiting.append(model(batch["tokens"], batch["labels"]))
                losses.append(waiting[-1].detach().float())
            else:
                (waiting.pop(0 if word == "b" else -1) / num_microbatches).backward()
        return torch.stack(losses)

    return forward_backward


def any_order(dice: random.Random, *, num_microbatches: int, in_flight: int) -> str:
    """An order for :func:`in_order`: up to so many microbatches, up to so many of them in flight at once."""
    order, num_waiting, left = "", 0, dice.randint(1, num_microbatches)
    while left or num_waiting:
        if left and num_waiting < in_flight and (not num_waiting or dice.random() < 0.5):
            order, num_waiting, left = order + "f", num_waiting + 1, left - 1
        else:
            order, num_waiting = order + dice.choice("bB"), num_waiting - 1
    return order
